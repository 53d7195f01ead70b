// Declares scaled_add's CPU loops. Split and memory traffic: csrc/cpu/scaled_add.cpp.
#pragma once

#include <cstdint>

#include "csrc/cpu/isa.h"

namespace fusedops::cpu::scaled_add {

// y = x + scale * residual of n elements; without x, y = scale * residual.
FUSEDOPS_ISA_FUNCTION(scaled_add_elements, Dtype dtype, const void* x, const void* residual,
                      void* y, float scale, int64_t n)

}  // namespace fusedops::cpu::scaled_add
