// Declares RMSNorm's and LayerNorm's CPU row loops. Formulas: fusedops/functional/norm.py; split
// and memory traffic: csrc/cpu/norm.cpp.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/norm.h"

namespace fusedops::cpu::norm {

using namespace fusedops::norm;

struct NormForwardArgs : NormForwardRows {
  const float *weight, *bias;  // [n] or null; weight includes the offset
  int64_t n;
};

struct NormBackwardArgs : NormBackwardRows {
  const float* weight;  // [n] or null; includes the offset
  int64_t n;
};

// out[i] = in[i] + offset, in float32
FUSEDOPS_ISA_FUNCTION(norm_scale, const void* in, Dtype dtype, int64_t n, float offset, float* out)

FUSEDOPS_ISA_FUNCTION(norm_forward_rows, const NormForwardArgs& args, int64_t begin, int64_t end)

// Adds the rows' shares to dweight [n] and dbias [n], unless they are null. scratch: [2 * n]
FUSEDOPS_ISA_FUNCTION(norm_backward_rows, const NormBackwardArgs& args, int64_t begin, int64_t end,
                      float* scratch, double* dweight, double* dbias)

// out[j] = sum over chunks of partials[chunk * stride + j], for begin <= j < end
FUSEDOPS_ISA_FUNCTION(norm_sum_chunks, const double* partials, int64_t chunks, int64_t stride,
                      int64_t begin, int64_t end, void* out, Dtype dtype)

}  // namespace fusedops::cpu::norm
