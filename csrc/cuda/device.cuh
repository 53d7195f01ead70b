// Types and functions that all CUDA kernels share: dtypes, vectors, 16-byte accesses and row sums.
// nvcc compiles it for GPUs, g++ with csrc/simt for CPUs.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "csrc/kernels/dtype.h"

#if defined(__CUDACC__)
#include "csrc/cuda/launch.cuh"
#else
#include "csrc/simt/simt.h"
#endif

namespace fusedops::cuda {

using c10::BFloat16;
using c10::Half;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

// Calls f(T{}) for the dtype's T.
template <class Function>
decltype(auto) for_dtype(Dtype dtype, const Function& f) {
  switch (dtype) {
    case Dtype::float32: return f(float{});
    case Dtype::bfloat16: return f(BFloat16{});
    default: return f(Half{});
  }
}

__device__ __forceinline__ float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

__device__ __forceinline__ uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether rows `stride` elements apart start at multiples of 16 bytes.
inline bool aligned_rows(const void* p, int64_t stride, Dtype dtype) {
  return aligned(p) && stride * size_of(dtype) % 16 == 0;
}

// Raw bytes, moved 16 at a time. Stored as 32-bit words, because in an array of a 16-bit dtype each
// element would take a register.
template <int kBytes>
struct Packed {
  static_assert(kBytes % 16 == 0 || kBytes == 8 || kBytes == 4 || kBytes == 2);
  using Word =
      std::conditional_t<kBytes % 16 == 0, uint4,
                         std::conditional_t<kBytes == 8, uint64_t,
                                            std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  static constexpr int kWords = kBytes / sizeof(Word);

  Word words[kWords];

  __device__ __forceinline__ static Packed load(const void* p) {
    const auto* const from = static_cast<const Word*>(p);
    Packed packed;
#pragma unroll
    for (int i = 0; i < kWords; ++i) packed.words[i] = load_word<Word>(from + i);
    return packed;
  }

  __device__ __forceinline__ void store(void* p) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_word(static_cast<Word*>(p) + i, words[i]);
  }
};

// N contiguous elements.
template <class T, int N>
struct Vec {
  T at[N];

  __device__ __forceinline__ static Vec of(const Packed<sizeof(T) * N>& packed) {
    Vec v;
    std::memcpy(static_cast<void*>(v.at), &packed, sizeof(v));
    return v;
  }
  __device__ __forceinline__ Packed<sizeof(T) * N> packed() const {
    Packed<sizeof(T) * N> packed;
    std::memcpy(static_cast<void*>(&packed), at, sizeof(packed));
    return packed;
  }
  __device__ __forceinline__ static Vec load(const T* p) {
    return of(Packed<sizeof(Vec)>::load(p));
  }
  __device__ __forceinline__ void store(T* p) const { packed().store(p); }
};

template <class To, class From, int N>
__device__ __forceinline__ Vec<To, N> converted(const Vec<From, N>& v) {
  Vec<To, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) out.at[k] = static_cast<To>(static_cast<float>(v.at[k]));
  return out;
}

// N elements as float32, whose dtype is known only at run time. All threads have the same dtype, so
// the branch costs little, and one kernel serves every dtype.
template <int N>
__device__ __forceinline__ Vec<float, N> load_floats(const void* p, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::float32: return Vec<float, N>::load(static_cast<const float*>(p) + i);
    case Dtype::bfloat16:
      return converted<float>(Vec<BFloat16, N>::load(static_cast<const BFloat16*>(p) + i));
    default: return converted<float>(Vec<Half, N>::load(static_cast<const Half*>(p) + i));
  }
}

template <int N>
__device__ __forceinline__ void store_floats(void* p, Dtype dtype, int64_t i,
                                             const Vec<float, N>& v) {
  switch (dtype) {
    case Dtype::float32: return v.store(static_cast<float*>(p) + i);
    case Dtype::bfloat16: return converted<BFloat16>(v).store(static_cast<BFloat16*>(p) + i);
    default: return converted<Half>(v).store(static_cast<Half*>(p) + i);
  }
}

template <int N>
__device__ __forceinline__ Vec<float, N> rounded(const Vec<float, N>& v, Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return v;
    case Dtype::bfloat16: return converted<float>(converted<BFloat16>(v));
    default: return converted<float>(converted<Half>(v));
  }
}

// Sums over a row's threads: blockDim.x of them, a power of two, with blockDim.y rows per block.
// Every thread of the block must call it, and each gets its row's sums. Sums are float32 within a
// warp and float64 across warps, so that long rows stay accurate.
template <int K>
__device__ __forceinline__ void row_sums(const float (&parts)[K], double (&totals)[K]) {
  const int lanes = blockDim.x;
  float sums[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    sums[k] = parts[k];
    for (int o = min(lanes, kWarp) / 2; o > 0; o /= 2) {
      sums[k] += __shfl_xor_sync(kAllLanes, sums[k], o);
    }
    totals[k] = sums[k];
  }
  if (lanes <= kWarp) return;

  FUSEDOPS_SHARED(float, warp_sums, kWarp* K);  // [warps of the block, K]
  const int warps = lanes / kWarp, first = threadIdx.y * warps;
  __syncthreads();  // until all threads have read the previous sums
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) warp_sums[(first + threadIdx.x / kWarp) * K + k] = sums[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    totals[k] = 0;
    for (int w = 0; w < warps; ++w) totals[k] += warp_sums[(first + w) * K + k];
  }
}

}  // namespace fusedops::cuda
