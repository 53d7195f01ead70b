// The norm family on GPUs: arguments of the kernels in forward.cu and backward.cu. Formulas:
// fusedops/functional/norm.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/dtype.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda {

// An element of x is kept when its random word is at least the threshold, and then scaled.
struct Dropout {
  const int64_t* seed = nullptr;  // on the device; null: nothing is dropped
  uint32_t threshold = 0;
  float scale = 1;
};

struct NormForwardArgs {
  const void *x, *residual;   // residual: null when there is nothing to add
  const void *weight, *bias;  // [n] or null
  void *y, *h;                // h: null without a residual
  double *mean, *rstd;        // [rows]; mean: null for RMSNorm
  int64_t rows, x_stride, residual_stride;
  int n;
  double per_n;  // 1 / n: a division of float64 is a call
  double eps;
  float offset;                                                           // added to the weight
  Dtype x_dtype, h_dtype, weight_dtype, bias_dtype, base_dtype, y_dtype;  // residual has h's
  bool round_first;                                                       // to base_dtype
  Dropout dropout;
};

struct NormBackwardArgs {
  const void *dy, *dh, *h;  // dh: null when there is none
  const void* weight;       // [n] or null
  const double *mean, *rstd;
  void *dresidual, *dx;  // null when not asked for
  int64_t rows, dy_stride, dh_stride, h_stride;
  int n;
  double per_n;
  float offset;
  Dtype dy_dtype, h_dtype, weight_dtype;  // dh, dresidual and dx have h's
  Dropout dropout;
  bool wants_dweight, wants_dbias;
  float* partials;  // [norm_chunks, wants_dweight + wants_dbias, n]; null when neither is wanted
};

// dweight and dbias, those of them that are wanted.
struct NormTotals {
  int count;
  void* out[2];  // [n]
  Dtype dtype[2];
};

void launch_norm_forward(const NormForwardArgs& args, CUstream_st* stream);

// In how many chunks of rows launch_norm_backward sums dweight and dbias.
int64_t norm_chunks(const NormBackwardArgs& args);

void launch_norm_backward(const NormBackwardArgs& args, CUstream_st* stream);

// totals.out[s][i] = the sum over chunks of partials[chunk, s, i]
void launch_norm_sums(const float* partials, int64_t chunks, int n, const NormTotals& totals,
                      CUstream_st* stream);

}  // namespace fusedops::cuda
