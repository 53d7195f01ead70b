// The last steps of quantized_linear's CUDA kernels: scale, bias and activation of a sum.
#pragma once

#include <cmath>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/quantized_linear/gemv.h"

namespace fusedops::cuda::quantized_linear {

__device__ __forceinline__ float activated(float z, Activation activation) {
  switch (activation) {
    case Activation::relu: return z < 0 ? 0 : z;  // keeps NaN
    case Activation::gelu: return 0.5f * z * erfcf(z * -0.70710678f);
    case Activation::gelu_tanh: return z / (1 + expf(-1.5957691f * (z + 0.044715f * z * z * z)));
    case Activation::silu: return z / (1 + expf(-z));
    default: return z;
  }
}

// Returns the sum of x w for int4, in order.
__device__ inline float sum_of_int4(const GemvArgs& a, int row, int64_t column) {
  float sum = 0;
  for (int64_t k = 0; k < a.k; ++k) {
    const int64_t group = column * a.groups + k / a.group_size;
    const int code = a.codes[column * ((a.k + 1) / 2) + k / 2] >> (k % 2 == 0 ? 4 : 0) & 0xf;
    const float w = static_cast<float>(code - a.zeros[group]) * a.scales[group];
    sum = fmaf(load_floats<1>(a.x, a.x_dtype, row * a.x_stride + k).at[0], w, sum);
  }
  return sum;
}

// Returns the sum, or what it should be. Tensor cores sum codes and zeros of int4 separately; if
// these sums are infinite, their difference is not the sum.
__device__ __forceinline__ float repaired(const GemvArgs& a, float sum, int row, int64_t column) {
  const bool separate = a.tensor_cores && a.format == WeightFormat::int4;
  return separate && !(fabsf(sum) < INFINITY) ? sum_of_int4(a, row, column) : sum;
}

// Writes element [row, column] of y and z, given its sum.
__device__ __forceinline__ void finish(const GemvArgs& a, float sum, int row, int64_t column) {
  const bool scaled = (a.format == WeightFormat::int8 || a.format == WeightFormat::fp8);
  if (a.steps != nullptr) sum *= a.steps[row];
  if (scaled && a.groups == 1) sum *= a.scales[column];
  if (a.bias != nullptr) sum += load_floats<1>(a.bias, a.dtype, column).at[0];
  const int64_t at = row * a.n + column;
  const auto z = rounded<1>({{sum}}, a.dtype);
  if (a.z != nullptr) store_floats<1>(a.z, a.dtype, at, z);
  store_floats<1>(a.y, a.dtype, at, {{activated(z.at[0], a.activation)}});
}

}  // namespace fusedops::cuda::quantized_linear
