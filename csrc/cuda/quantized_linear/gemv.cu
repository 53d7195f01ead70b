// quantized_linear on GPUs for at most four rows of x. Formats: fusedops/functional/
// quantized_linear.py.
//
// A block of kWarps warps has kColumns rows of the weight, and walks over their depth: a thread
// takes 16 bytes of each row at a time, decodes them to float32 in registers, and multiplies them
// by the same stretch of every row of x, which is in the cache. So the weight is read once, in
// whole vectors, and all products and sums are float32. If the weight has few rows, the depth is
// split among blocks, whose sums gemv_join adds in order. If vectors do not fit (odd depths, groups
// that end within a vector, misaligned rows), a thread takes one code at a time.

#include <algorithm>
#include <cmath>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/quantized_linear/finish.cuh"
#include "csrc/cuda/quantized_linear/gemv.h"

namespace fusedops::cuda::quantized_linear {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kColumns = 4;  // columns of y per block
constexpr int kBlocks = 4;   // blocks per multiprocessor that splitting the depth aims for

constexpr bool two_a_byte(WeightFormat format) {
  return format == WeightFormat::int4 || format == WeightFormat::nf4;
}

// How many codes are decoded at once. With more, ptxas spills nf4's to stay at 128 registers.
constexpr int stretch_of(WeightFormat format, int rows) {
  return format == WeightFormat::nf4 && rows == 1 ? 8 : 16;
}

// Returns a code's value before scaling. Integers become floats by writing them into the low bits
// of 2^23: a conversion instruction takes four times as long.
template <WeightFormat kFormat>
__device__ __forceinline__ float number(uint32_t q, float zero, const float* nf4) {
  if constexpr (kFormat == WeightFormat::int8) {
    return float_of(0x4b000000 | (q ^ 0x80)) - 8388736.f;
  } else if constexpr (kFormat == WeightFormat::int4) {
    return float_of(0x4b000000 | q) - (8388608.f + zero);
  } else if constexpr (kFormat == WeightFormat::nf4) {
    return nf4[q];
  } else {  // float8_e4m3fn: a float32 of a smaller exponent
    const float f = float_of((q & 0x7f) << 20 | (q & 0x80) << 24) * 0x1p120f;
    return (q & 0x7f) == 0x7f ? NAN : f;
  }
}

// Returns code i of consecutive words. The first of two codes in a byte is the high half.
template <WeightFormat kFormat>
__device__ __forceinline__ uint32_t code_of(const uint32_t* words, int i) {
  if constexpr (two_a_byte(kFormat)) {
    return words[i / 8] >> (i % 8 / 2 * 8 + (i % 2 == 0 ? 4 : 0)) & 0xf;
  } else {
    return words[i / 4] >> (i % 4 * 8) & 0xff;
  }
}

// Returns the index of the scale for column k of a weight row.
template <WeightFormat kFormat>
__device__ __forceinline__ int64_t group_of(const GemvArgs& a, int64_t row, int64_t k) {
  if constexpr (kFormat == WeightFormat::nf4) return (row * a.k + k) / kNf4Block;
  // 64-bit divisions take a hundred instructions.
  const int64_t group = a.k <= 0x7fffffff && a.group_size <= 0x7fffffff
                            ? static_cast<uint32_t>(k) / static_cast<uint32_t>(a.group_size)
                            : k / a.group_size;
  return row * a.groups + group;
}

// Whether a row's scale multiplies its sum.
template <WeightFormat kFormat>
__device__ __forceinline__ bool a_scale_a_row(const GemvArgs& a) {
  return (kFormat == WeightFormat::int8 || kFormat == WeightFormat::fp8) && a.groups == 1;
}

// A thread's sums.
template <WeightFormat kFormat, int M>
struct Sums {
  float of[kColumns][M] = {};

  // Adds the products of N codes from column k, for each of the rows from `row`.
  template <int N>
  __device__ __forceinline__ void add(const GemvArgs& a, const float* nf4, int64_t row, int64_t k,
                                      const uint32_t (&words)[kColumns][4], int first) {
    float w[kColumns][N], scale[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float zero = 0;
      scale[c] = 1;
      if (!a_scale_a_row<kFormat>(a)) {
        const int64_t group = group_of<kFormat>(a, min(row + c, a.n - 1), k);
        scale[c] = a.scales[group];
        if constexpr (kFormat == WeightFormat::int4) zero = a.zeros[group];
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        w[c][i] = number<kFormat>(code_of<kFormat>(words[c], first + i), zero, nf4);
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const auto x = load_floats<N>(a.x, a.x_dtype, min(m, a.rows - 1) * a.x_stride + k);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) sum = fmaf(w[c][i], x.at[i], sum);
        of[c][m] = fmaf(sum, scale[c], of[c][m]);
      }
    }
  }
};

// Loops over 16 bytes of a row at a time.
template <WeightFormat kFormat, int M>
__device__ __forceinline__ void add_vectors(const GemvArgs& a, const float* nf4, int64_t row,
                                            Sums<kFormat, M>& sums) {
  constexpr int codes = two_a_byte(kFormat) ? 32 : 16, stretch = stretch_of(kFormat, M);
  const int64_t bytes = a.k * 16 / codes;  // per row
  for (int64_t at = int64_t{blockIdx.y} * kThreads + threadIdx.x; at * 16 < bytes;
       at += int64_t{gridDim.y} * kThreads) {
    uint32_t words[kColumns][4];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const auto packed = Packed<16>::load(a.codes + min(row + c, a.n - 1) * bytes + at * 16);
      std::memcpy(words[c], &packed, sizeof(packed));
    }
#pragma unroll
    for (int first = 0; first < codes; first += stretch) {
      sums.template add<stretch>(a, nf4, row, at * codes + first, words, first);
    }
  }
}

// Loops over one code at a time.
template <WeightFormat kFormat, int M>
__device__ __forceinline__ void add_codes(const GemvArgs& a, const float* nf4, int64_t row,
                                          Sums<kFormat, M>& sums) {
  for (int64_t k = int64_t{blockIdx.y} * kThreads + threadIdx.x; k < a.k;
       k += int64_t{gridDim.y} * kThreads) {
    uint32_t words[kColumns][4];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int64_t r = min(row + c, a.n - 1);
      if constexpr (kFormat == WeightFormat::int4) {
        const uint32_t byte = a.codes[r * ((a.k + 1) / 2) + k / 2];
        words[c][0] = k % 2 == 0 ? byte : byte << 4;
      } else if constexpr (kFormat == WeightFormat::nf4) {
        const uint32_t byte = a.codes[(r * a.k + k) / 2];
        words[c][0] = (r * a.k + k) % 2 == 0 ? byte : byte << 4;
      } else {
        words[c][0] = a.codes[r * a.k + k];
      }
    }
    sums.template add<1>(a, nf4, row, k, words, 0);
  }
}

template <WeightFormat kFormat, bool kVectors, int M>
__global__ void __launch_bounds__(kThreads) gemv(const GemvArgs a) {
  FUSEDOPS_SHARED(float, nf4, 16);
  FUSEDOPS_SHARED(float, warp_sums, kWarps * kColumns * M);
  if (kFormat == WeightFormat::nf4) {
    if (threadIdx.x < 16) nf4[threadIdx.x] = a.nf4[threadIdx.x];
    __syncthreads();
  }
  const int64_t row = int64_t{blockIdx.x} * kColumns;
  Sums<kFormat, M> sums;
  if constexpr (kVectors) {
    add_vectors<kFormat, M>(a, nf4, row, sums);
  } else {
    add_codes<kFormat, M>(a, nf4, row, sums);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float sum = sums.of[c][m];
      for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
      if (threadIdx.x % kWarp == 0) warp_sums[(threadIdx.x / kWarp * kColumns + c) * M + m] = sum;
    }
  }
  __syncthreads();
  const int c = threadIdx.x / M, m = threadIdx.x % M;
  if (c >= kColumns || m >= a.rows || row + c >= a.n) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += warp_sums[(w * kColumns + c) * M + m];
  if (a.partials == nullptr) return finish(a, sum, m, row + c);
  a.partials[(int64_t{blockIdx.y} * a.rows + m) * a.n + row + c] = sum;
}

__global__ void __launch_bounds__(kThreads) gemv_join(const GemvArgs a) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x, size = a.rows * a.n;
  if (at >= size) return;
  float sum = 0;
  for (int part = 0; part < a.parts; ++part) sum += a.partials[part * size + at];
  const int row = static_cast<int>(at / a.n);
  finish(a, repaired(a, sum, row, at % a.n), row, at % a.n);
}

// Whether every thread can load 16 bytes of codes at a time, and those 16 bytes share one scale.
bool whole_vectors(const GemvArgs& a) {
  if (!aligned(a.codes) || !aligned_rows(a.x, a.x_stride, a.x_dtype)) return false;
  switch (a.format) {
    case WeightFormat::int4: return a.k % 32 == 0 && a.group_size % 16 == 0;
    case WeightFormat::nf4: return a.k % kNf4Block == 0;
    default: return a.k % 16 == 0 && (a.groups == 1 || a.group_size % 16 == 0);
  }
}

int64_t blocks_of(const GemvArgs& a) { return (a.n + kColumns - 1) / kColumns; }

template <WeightFormat kFormat, int M>
void launch_rows(const GemvArgs& a, CUstream_st* stream) {
  const dim3 grid(static_cast<unsigned>(blocks_of(a)), a.parts);
  whole_vectors(a) ? launch(gemv<kFormat, true, M>, grid, dim3(kThreads), 0, stream, a)
                   : launch(gemv<kFormat, false, M>, grid, dim3(kThreads), 0, stream, a);
}

template <WeightFormat kFormat>
void launch_format(const GemvArgs& a, CUstream_st* stream) {
  if (a.rows == 1) return launch_rows<kFormat, 1>(a, stream);
  a.rows == 2 ? launch_rows<kFormat, 2>(a, stream) : launch_rows<kFormat, kGemvRows>(a, stream);
}

}  // namespace

void plan_gemv(GemvArgs& a) {
  a.tensor_cores = on_tensor_cores(a);
  if (a.tensor_cores) return split_on_tensor_cores(a);
  const int64_t codes = !whole_vectors(a) ? 1 : two_a_byte(a.format) ? 32 : 16;
  const int64_t most = a.k / (codes * kThreads);  // so that each thread has work
  const int64_t parts_to_fill = int64_t{kBlocks} * multiprocessors() / blocks_of(a);
  a.parts = static_cast<int>(std::max<int64_t>(1, std::min(parts_to_fill, most)));
}

void launch_gemv(const GemvArgs& a, CUstream_st* stream) {
  if (a.tensor_cores) {
    launch_on_tensor_cores(a, stream);
  } else {
    switch (a.format) {
      case WeightFormat::int8: launch_format<WeightFormat::int8>(a, stream); break;
      case WeightFormat::int4: launch_format<WeightFormat::int4>(a, stream); break;
      case WeightFormat::nf4: launch_format<WeightFormat::nf4>(a, stream); break;
      case WeightFormat::fp8: launch_format<WeightFormat::fp8>(a, stream); break;
    }
  }
  if (a.partials == nullptr) return;
  const int64_t blocks = (a.rows * a.n + kThreads - 1) / kThreads;
  launch(gemv_join, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, a);
}

}  // namespace fusedops::cuda::quantized_linear
