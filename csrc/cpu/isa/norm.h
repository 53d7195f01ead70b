// The row loops of the norm family. Formulas: fusedops/functional/norm.py; split and memory
// traffic: csrc/cpu/norm.cpp.
#pragma once

#include "csrc/cpu/isa.h"

namespace fusedops::cpu {

struct Dropout {
  uint64_t seed = 0;
  uint32_t threshold = 0;  // an element is kept when its random word is at least this
  float scale = 1;         // of a kept element
  bool on = false;
};

struct NormForwardRows {
  const void *x, *residual;    // residual: null when there is nothing to add
  const float *weight, *bias;  // [n] or null; weight includes the offset
  void *y, *h;                 // h: null without a residual
  double *mean, *rstd;         // [rows]; mean: null for RMSNorm
  int64_t n, x_stride, residual_stride;
  double eps;
  Dtype x_dtype, h_dtype, base_dtype, y_dtype;  // residual has h's
  bool round_first;                             // to base_dtype, before the weight
  Dropout dropout;
};

struct NormBackwardRows {
  const void *dy, *dh, *h;  // dh: null when there is none
  const float* weight;      // [n] or null; includes the offset
  const double *mean, *rstd;
  void *dresidual, *dx;  // null when not asked for
  int64_t n, dy_stride, dh_stride, h_stride;
  Dtype dy_dtype, h_dtype;  // dh, dresidual and dx have h's
  Dropout dropout;
};

// out[i] = in[i] + offset, in float32
FUSEDOPS_ISA_FUNCTION(norm_scale, const void* in, Dtype dtype, int64_t n, float offset, float* out)

FUSEDOPS_ISA_FUNCTION(norm_forward_rows, const NormForwardRows& args, int64_t begin, int64_t end)

// Adds what the rows give to dweight [n] and dbias [n], where they are not null. scratch: [2 * n]
FUSEDOPS_ISA_FUNCTION(norm_backward_rows, const NormBackwardRows& args, int64_t begin, int64_t end,
                      float* scratch, double* dweight, double* dbias)

// out[j] = sum over chunks of partials[chunk * stride + j], for begin <= j < end
FUSEDOPS_ISA_FUNCTION(norm_sum_chunks, const double* partials, int64_t chunks, int64_t stride,
                      int64_t begin, int64_t end, void* out, Dtype dtype)

}  // namespace fusedops::cpu
