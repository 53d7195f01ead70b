// Quantizes rows of x to 8-bit codes, stored as float32, for quantized_linear. Formats:
// csrc/kernels/quantized_rows.h.
//
// One block per row. Its threads take a row piece by piece: kVectors vectors of 16 bytes each, all
// loaded before the first is used. The last piece is still in registers when its codes are stored.
// So a row of one piece, up to 16384 float32 or 32768 of 16 bits, is read once, and a longer one
// twice. If addresses do not allow vectors, a thread takes kVectors single elements instead.

#include <algorithm>
#include <cmath>

#include "csrc/cuda/codes.cuh"
#include "csrc/cuda/quantized_linear/gemv.h"

namespace fusedops::cuda::quantized_linear {
namespace {

constexpr int kThreads = 512;  // maximum threads per row
constexpr int kVectors = 8;    // vectors of a row that a thread keeps

// A part of a row in its threads' registers.
template <class T, int N>
class Piece {
 public:
  static constexpr int kSize = kVectors * N;  // elements per thread

  __device__ __forceinline__ explicit Piece(const QuantizeRows& a)
      : x_(static_cast<const T*>(a.x) + blockIdx.x * a.x_stride), k_(a.k) {}

  // Loads the piece that begins at column `start`.
  __device__ __forceinline__ void load(int64_t start) {
    const T* const from = x_ + start;
    left_ = static_cast<int>(min(k_ - start, int64_t{kSize} * blockDim.x));
    each([&](int i, int col) { held_[i] = Packed<sizeof(T) * N>::load(from + col); });
  }

  // Calls body(column, numbers) for each vector. Columns are the piece's.
  template <class Body>
  __device__ __forceinline__ void each_vector(const Body& body) const {
    each([&](int i, int col) { body(col, converted<float>(Vec<T, N>::of(held_[i]))); });
  }

 private:
  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int col = (i * blockDim.x + threadIdx.x) * N;
      if (col < left_) body(i, col);
    }
  }

  const T* const x_;
  const int64_t k_;
  int left_;
  Packed<sizeof(T) * N> held_[kVectors];
};

// Always in whole vectors if N allows it: of float32 the compiler would store single elements.
template <int N>
__device__ __forceinline__ void store_numbers(float* to, const Vec<float, N>& v) {
  if constexpr (N == 1) {
    *to = v.at[0];
  } else {
    const auto packed = v.packed();
#pragma unroll
    for (int i = 0; i < N / 4; ++i) store_global(to + i * 4, packed.words[i]);
  }
}

template <class T, int N, InputFormat kFormat>
__global__ void __launch_bounds__(kThreads) quantize_rows(const QuantizeRows a) {
  const int64_t step = int64_t{Piece<T, N>::kSize} * blockDim.x;
  Piece<T, N> piece(a);
  int64_t start = 0;  // of the piece in registers
  float largest = 0;
  while (true) {
    piece.load(start);
    piece.each_vector([&](int, const Vec<float, N>& v) {
#pragma unroll
      for (int k = 0; k < N; ++k) largest = larger_size(largest, v.at[k]);
    });
    if (start + step >= a.k) break;
    start += step;
  }
  largest = row_max(largest);
  constexpr float most = largest_code(kFormat);
  const float scale = largest < INFINITY ? largest * (1 / most) : NAN;
  const float inverse = scale < kSmallestScale ? 0 : 1 / scale;
  while (true) {
    float* const codes = a.codes + blockIdx.x * a.k + start;
    piece.each_vector([&](int col, Vec<float, N> v) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float number = fminf(fmaxf(v.at[k] * inverse, -most), most);
        v.at[k] = kFormat == InputFormat::int8 ? rintf(number) : nearest_e4m3(number);
      }
      store_numbers(codes + col, v);
    });
    if (start == 0) break;
    start -= step;
    piece.load(start);
  }
  if (threadIdx.x == 0) a.steps[blockIdx.x] = scale;
}

// Returns the threads for a row of so many vectors: a power of two, of whole warps.
unsigned threads_for(int64_t vectors) {
  unsigned threads = kWarp;
  while (threads < kThreads && threads < vectors) threads *= 2;
  return threads;
}

template <class T, int N>
void launch_vectors(const QuantizeRows& a, CUstream_st* stream) {
  const auto kernel = a.format == InputFormat::int8 ? quantize_rows<T, N, InputFormat::int8>
                                                    : quantize_rows<T, N, InputFormat::fp8>;
  const dim3 grid(static_cast<unsigned>(a.rows)), block(threads_for(a.k / N));
  launch(kernel, grid, block, 0, stream, a);
}

}  // namespace

void launch_quantize_rows(const QuantizeRows& a, CUstream_st* stream) {
  for_dtype(a.x_dtype, [&](auto x) {
    using T = decltype(x);
    constexpr int N = 16 / sizeof(T);
    const bool whole_vectors =
        a.k % N == 0 && aligned_rows(a.x, a.x_stride, a.x_dtype) && aligned(a.codes);
    whole_vectors ? launch_vectors<T, N>(a, stream) : launch_vectors<T, 1>(a, stream);
  });
}

}  // namespace fusedops::cuda::quantized_linear
