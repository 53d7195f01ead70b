// Rounds float32 to 8-bit codes: rows are scaled by their largest number. Formats:
// csrc/kernels/quantized_rows.h.
#pragma once

#include <cmath>

#include "csrc/cuda/device.cuh"
#include "csrc/kernels/quantized_rows.h"

namespace fusedops::cuda {

// Rounds v to the nearest number of float8_e4m3fn with bit operations, so that the compiler fuses
// no product with a sum. Below 2^-6 the numbers are multiples of 2^-9, above they have 3 fraction
// bits. v is within the format's range.
__device__ __forceinline__ float nearest_e4m3(float v) {
  if (fabsf(v) < 0x1p-6f) return rintf(v * 0x1p9f) * 0x1p-9f;
  const uint32_t bits = bits_of(v);
  return float_of((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000);
}

// Returns the code of a number that float8_e4m3fn represents exactly.
__device__ __forceinline__ uint32_t e4m3_code(float number) {
  const uint32_t bits = bits_of(number), size = bits & 0x7fffffff;
  const uint32_t normal = (size >> 20) - (120 << 3);
  const uint32_t small = static_cast<uint32_t>(fabsf(number) * 0x1p9f);
  return (size < 121u << 23 ? small : normal) | (bits >> 24 & 0x80);
}

// Returns the larger size; infinity if one of the numbers is not finite. largest: 0 or more.
__device__ __forceinline__ float larger_size(float largest, float v) {
  const float size = fabsf(v);
  return size < INFINITY ? fmaxf(largest, size) : INFINITY;
}

// The largest part of a row's threads, as row_sums splits them. Every thread of the block calls it.
__device__ __forceinline__ float row_max(float part) {
  const int lanes = blockDim.x;
  for (int o = min(lanes, kWarp) / 2; o > 0; o /= 2) {
    part = fmaxf(part, __shfl_xor_sync(kAllLanes, part, o));
  }
  if (lanes <= kWarp) return part;

  FUSEDOPS_SHARED(float, warp_maxima, kWarp);
  const int warps = lanes / kWarp, first = threadIdx.y * warps;
  if (threadIdx.x % kWarp == 0) warp_maxima[first + threadIdx.x / kWarp] = part;
  __syncthreads();
  for (int w = 0; w < warps; ++w) part = fmaxf(part, warp_maxima[first + w]);
  return part;
}

// How a row becomes codes, from its largest number.
class RowCodes {
 public:
  __device__ __forceinline__ RowCodes(RowFormat format, float largest)
      : format_(format),
        finite_(largest < INFINITY),
        most_(largest_code(format)),
        scale_(finite_ ? largest * (1 / most_) : NAN),
        inverse_(scale_ < kSmallestScale ? 0 : 1 / scale_) {}

  __device__ __forceinline__ float scale() const { return scale_; }

  // Stores the codes of elements [i, i + N).
  template <int N>
  __device__ __forceinline__ void store(void* codes, int64_t i, const Vec<float, N>& v) const {
    Vec<uint8_t, N> bytes;
#pragma unroll
    for (int k = 0; k < N; ++k) bytes.at[k] = static_cast<uint8_t>(code(v.at[k]));
    if constexpr (N == 1) {
      static_cast<uint8_t*>(codes)[i] = bytes.at[0];
    } else {
      bytes.store(static_cast<uint8_t*>(codes) + i);
    }
  }

 private:
  __device__ __forceinline__ uint32_t code(float v) const {
    if (!finite_) return 0;
    const float number = fminf(fmaxf(v * inverse_, -most_), most_);
    if (format_ == RowFormat::fp8) return e4m3_code(nearest_e4m3(number));
    return static_cast<uint32_t>(static_cast<int>(rintf(number)));
  }

  const RowFormat format_;
  const bool finite_;
  const float most_, scale_, inverse_;
};

}  // namespace fusedops::cuda
