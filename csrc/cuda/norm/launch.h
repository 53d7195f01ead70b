// Launchers and kernel arguments of RMSNorm and LayerNorm on GPUs. Formulas:
// fusedops/functional/norm.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/norm.h"
#include "csrc/kernels/quantized_rows.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda::norm {

using namespace fusedops::norm;

struct NormForwardArgs : NormForwardRows {
  const void *weight, *bias;  // [n] or null
  int n;
  double per_n;  // 1 / n, because a float64 division is a function call
  float offset;  // added to the weight
  Dtype weight_dtype, bias_dtype;
  RowFormat format;  // of y if it is codes
  float* scale;      // [rows], of the codes
  double* moments;   // [rows, norm_parts, 2], scratch; null for one part
};

struct NormBackwardArgs : NormBackwardRows {
  const void* weight;  // [n] or null
  int n;
  double per_n;
  float offset;
  Dtype weight_dtype;
  bool wants_dweight, wants_dbias;
  float* partials;  // [norm_chunks, wants_dweight + wants_dbias, n]; null if neither is requested
};

// The requested ones of dweight and dbias.
struct NormTotals {
  int count;
  void* out[2];  // [n]
  Dtype dtype[2];
};

// Returns the number of parts of each row that launch_norm_forward gives to blocks of their own.
int64_t norm_parts(const NormForwardArgs& args);

void launch_norm_forward(const NormForwardArgs& args, CUstream_st* stream);

// The same for RMSNorm with y as codes; stores no statistics.
void launch_rms_norm_codes(const NormForwardArgs& args, CUstream_st* stream);

// Returns the number of row chunks in which launch_norm_backward sums dweight and dbias.
int64_t norm_chunks(const NormBackwardArgs& args);

void launch_norm_backward(const NormBackwardArgs& args, CUstream_st* stream);

// totals.out[s][i] = the sum over chunks of partials[chunk, s, i]
void launch_norm_sums(const float* partials, int64_t chunks, int n, const NormTotals& totals,
                      CUstream_st* stream);

}  // namespace fusedops::cuda::norm
