// Declares AdamW's CPU loops. Formulas: csrc/kernels/adamw.h and fusedops/functional/adamw.py;
// split and memory traffic: csrc/cpu/adamw.cpp.
#pragma once

#include "csrc/kernels/adamw.h"
#include "csrc/cpu/isa.h"

namespace fusedops::cpu::adamw {

using namespace fusedops::adamw;

// Steps a tensor's blocks [begin, end). key: adamw_key; gradient_factor: multiplies the gradients;
// negative for `maximize`.
FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(adamw_blocks, const AdamWTensor& tensor, uint64_t key,
                                   const AdamWFactors& factors, float gradient_factor,
                                   int64_t begin, int64_t end)

// Adds the squares of n elements to total.
FUSEDOPS_ISA_FUNCTION(sum_of_squares, const void* grad, Dtype dtype, int64_t n, double* total)

// Multiplies n elements by a factor.
FUSEDOPS_ISA_FUNCTION(scale_in_place, void* grad, Dtype dtype, int64_t n, float factor)

}  // namespace fusedops::cpu::adamw
