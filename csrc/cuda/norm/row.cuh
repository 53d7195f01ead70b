// Shared by the norm kernels: how a row is split over threads, its arithmetic, and dropout.
#pragma once

#include <type_traits>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/norm/launch.h"
#include "csrc/kernels/philox.h"

namespace fusedops::cuda::norm {

constexpr int kMaxThreads = 512;  // per row

// Returns the threads for a row of n elements: a power of two, with about `each` elements each.
inline int lanes_of(int n, int each) {
  int lanes = 1;
  while (lanes < kMaxThreads && int64_t{lanes} * each < n) lanes *= 2;
  return lanes;
}

// Returns a block: x threads per row and y rows. Short rows share a block of `threads`, a power of
// two up to kMaxThreads, for which the kernels are compiled.
inline dim3 block_of(int lanes, int threads) {
  return dim3(lanes, lanes < threads ? threads / lanes : 1);
}

// Calls body(i, col) for the vectors of a row that its `lanes` threads keep in registers. If lanes
// is a constant, so are the distances between a thread's addresses.
template <int N, int kVectors, class Body>
__device__ __forceinline__ void each_held(int n, const Body& body, int lanes = blockDim.x) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int col = (i * lanes + threadIdx.x) * N;
    if (col < n) body(i, col);
  }
}

// A float64 as two float32. If rows are float32, a statistic keeps its second word: its rounding
// alone would shift the whole row by up to half an ulp.
struct Split {
  float high, low;

  __device__ __forceinline__ explicit Split(double x)
      : high(static_cast<float>(x)),
        low(fabs(x) == INFINITY ? 0.f : static_cast<float>(x - high)) {}
};

// h - mean for LayerNorm, h for RMSNorm
template <bool kLayer, class T>
__device__ __forceinline__ float centred(float h, const Split& mean) {
  if constexpr (!kLayer) return h;
  const float c = h - mean.high;
  if constexpr (std::is_same_v<T, float>) return c - mean.low;
  return c;
}

template <class T>
__device__ __forceinline__ float scaled(float c, const Split& rstd) {
  if constexpr (std::is_same_v<T, float>) return fmaf(c, rstd.high, c * rstd.low);
  return c * rstd.high;
}

// Returns words.at[k] without an array in local memory.
__device__ __forceinline__ uint32_t pick(const Words& words, int k) {
  const uint32_t low = k == 0 ? words.at[0] : words.at[1];
  const uint32_t high = k == 2 ? words.at[2] : words.at[3];
  return k < 2 ? low : high;
}

// A dropout with its seed, read once. Rows are cast to 32 bits: then the compiler knows that two of
// the generator's four counters start at 0.
class Mask {
 public:
  __device__ __forceinline__ explicit Mask(const Dropout& dropout)
      : dropout_(dropout),
        seed_(dropout.seed == nullptr ? 0 : static_cast<uint64_t>(*dropout.seed)) {}

  // Multiplies v, a row's elements from `col` on, by 0 where dropped and by the scale elsewhere.
  template <int N>
  __device__ __forceinline__ void drop(Vec<float, N>& v, int64_t row, int col) const {
    if (dropout_.seed == nullptr) return;
#pragma unroll
    for (int k = 0; k < N; k += 4) {
      const Words words = philox(seed_, static_cast<uint32_t>(row), (col + k) / 4);
#pragma unroll
      for (int j = 0; j < 4 && k + j < N; ++j) {
        const uint32_t word = N == 1 ? pick(words, col % 4) : words.at[j];
        v.at[k + j] *= word >= dropout_.threshold ? dropout_.scale : 0.f;
      }
    }
  }

 private:
  const Dropout& dropout_;
  const uint64_t seed_;
};

// Multiplies v by the weight's elements from `col`, plus the offset; without a weight, by nothing.
template <int N>
__device__ __forceinline__ void multiply_by_weight(Vec<float, N>& v, const void* weight,
                                                   Dtype dtype, float offset, int col) {
  if (weight == nullptr) return;
  const auto w = load_floats<N>(weight, dtype, col);
#pragma unroll
  for (int k = 0; k < N; ++k) v.at[k] *= w.at[k] + offset;
}

}  // namespace fusedops::cuda::norm
