// RMSNorm's and LayerNorm's forward on GPUs. h = residual + dropout(x), y = norm(h).
//
// A row belongs to blockDim.x threads, a power of two, and blockDim.y short rows share a block.
// Rows of up to 32 KiB whose addresses allow 16-byte accesses stay in registers between the sums
// and the result: x and residual are read once, h and y written once. Longer rows are cut into
// parts of 32 KiB: one launch takes each part's moments, a second one joins them in order and reads
// h (or x) again. So a few long rows fill a GPU, too. Rows whose addresses do not allow that, rows
// of two dtypes and long rows of codes are walked: they stay in shared memory if they fit;
// otherwise h (or x) is read again from global memory. A thread touches the same columns in every
// pass, so only the sums need a barrier.
//
// If y is rows of codes, it is computed twice from the kept row: for its largest number, and for
// the codes. So y itself is never stored.

#include <cmath>
#include <cstdint>

#include "csrc/cuda/codes.cuh"
#include "csrc/cuda/norm/row.cuh"

namespace fusedops::cuda::norm {
namespace {

constexpr int kThreads = 128;  // minimum threads per block
constexpr int kVectors = 4;    // 16-byte vectors of a row that a thread keeps

template <class H, int N>
__device__ __forceinline__ Packed<sizeof(H) * N> load_residual(const NormForwardArgs& a,
                                                               int64_t row, int col) {
  const H* const residual = static_cast<const H*>(a.residual) + row * a.residual_stride;
  return Packed<sizeof(H) * N>::load(residual + col);
}

// Stores and returns h for N columns, rounded to H.
template <class H, int N>
__device__ __forceinline__ Vec<H, N> add(const NormForwardArgs& a, int64_t row, int col,
                                         Vec<float, N> x, const Vec<H, N>& residual) {
#pragma unroll
  for (int k = 0; k < N; ++k) x.at[k] += static_cast<float>(residual.at[k]);
  const auto h = converted<H>(x);
  h.store(static_cast<H*>(a.h) + row * a.n + col);
  return h;
}

// Returns y, before it is rounded, for N columns.
template <class H, bool kLayer, int N>
__device__ __forceinline__ Vec<float, N> normalised(const NormForwardArgs& a, int col,
                                                    const Vec<float, N>& h, const Split& mean,
                                                    const Split& rstd) {
  Vec<float, N> v;
#pragma unroll
  for (int k = 0; k < N; ++k) v.at[k] = scaled<H>(centred<kLayer, H>(h.at[k], mean), rstd);
  if (a.round_first) v = rounded(v, a.base_dtype);
  multiply_by_weight(v, a.weight, a.weight_dtype, a.offset, col);
  if (a.bias != nullptr) {
    const auto b = load_floats<N>(a.bias, a.bias_dtype, col);
#pragma unroll
    for (int k = 0; k < N; ++k) v.at[k] += b.at[k];
  }
  return v;
}

// Columns of a row.
struct Columns {
  int begin, count;
};

// A row, or columns of it, in its threads' registers. All loads are issued before the first sum.
template <class H, int N, bool kDrops>
class HeldRow {
 public:
  __device__ __forceinline__ HeldRow(const NormForwardArgs& a, int64_t row)
      : HeldRow(a, row, {0, row < a.rows ? a.n : 0}) {}

  __device__ __forceinline__ HeldRow(const NormForwardArgs& a, int64_t row, Columns at)
      : HeldRow(static_cast<const H*>(a.x) + row * a.x_stride, at) {
    if (a.residual == nullptr) return;
    const Mask mask(a.dropout);
    Packed<16> residual[kVectors];
    each_held<N, kVectors>(at.count, [&](int i, int col) {
      residual[i] = load_residual<H, N>(a, row, at.begin + col);
    });
    each_held<N, kVectors>(at.count, [&](int i, int col) {
      auto x = converted<float>(Vec<H, N>::of(held_[i]));
      if constexpr (kDrops) mask.drop(x, row, at.begin + col);
      held_[i] = add(a, row, at.begin + col, x, Vec<H, N>::of(residual[i])).packed();
    });
  }

  // h, or x without a residual, from its first column on.
  __device__ __forceinline__ HeldRow(const H* h, Columns at) : at_(at) {
    each_held<N, kVectors>(at.count, [&](int i, int col) {
      held_[i] = Packed<16>::load(h + at.begin + col);
    });
  }

  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
    each_held<N, kVectors>(at_.count, [&](int i, int col) {
      body(at_.begin + col, converted<float>(Vec<H, N>::of(held_[i])));
    });
  }

 private:
  const Columns at_;
  Packed<16> held_[kVectors];
};

// A row that is read again at each pass: from shared memory, or from h (x without a residual).
template <class H, int N>
class WalkedRow {
 public:
  __device__ __forceinline__ WalkedRow(const NormForwardArgs& a, int64_t row, bool in_shared)
      : n_(row < a.rows ? a.n : 0) {
    H* const shared = dynamic_shared<H>() + int64_t{threadIdx.y} * a.n;
    const H* const h = a.residual == nullptr ? static_cast<const H*>(a.x) + row * a.x_stride
                                             : static_cast<const H*>(a.h) + row * a.n;
    source_ = in_shared ? shared : h;
    const Mask mask(a.dropout);
    for (int col = threadIdx.x * N; col < n_; col += blockDim.x * N) {
      auto x = load_floats<N>(a.x, a.x_dtype, row * a.x_stride + col);
      mask.drop(x, row, col);
      const auto v = a.residual == nullptr
                         ? converted<H>(x)
                         : add(a, row, col, x, Vec<H, N>::of(load_residual<H, N>(a, row, col)));
      if (in_shared) v.store(shared + col);
    }
  }

  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
    for (int col = threadIdx.x * N; col < n_; col += blockDim.x * N) {
      body(col, converted<float>(Vec<H, N>::load(source_ + col)));
    }
  }

 private:
  const int n_;
  const H* source_;
};

// The mean, and the variance about it. The first mean is only as exact as a float32 sum; in float32
// the mean of the differences from it corrects both.
template <class H, int N, class Row>
__device__ __forceinline__ void layer_moments(const Row& held, double per_n, double& mean,
                                              double& variance) {
  float sum[1] = {0};
  held.each([&](int, const Vec<float, N>& h) {
#pragma unroll
    for (int k = 0; k < N; ++k) sum[0] += h.at[k];
  });
  double total[1];
  row_sums(sum, total);
  const Split first(total[0] * per_n);

  float sums[2] = {0, 0};  // sums of h - first and its square
  held.each([&](int, const Vec<float, N>& h) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float c = centred<true, H>(h.at[k], first);
      sums[0] += c;
      sums[1] = fmaf(c, c, sums[1]);
    }
  });
  double totals[2];
  row_sums(sums, totals);
  const double rest = totals[0] * per_n;
  mean = static_cast<double>(first.high) + (std::is_same_v<H, float> ? first.low : 0.f) + rest;
  variance = totals[1] * per_n - rest * rest;
  if (variance < 0) variance = 0;  // for equal elements; keeps NaN
}

template <int N, class Row>
__device__ __forceinline__ double mean_square(const Row& held, double per_n) {
  float sum[1] = {0};
  held.each([&](int, const Vec<float, N>& h) {
#pragma unroll
    for (int k = 0; k < N; ++k) sum[0] = fmaf(h.at[k], h.at[k], sum[0]);
  });
  double total[1];
  row_sums(sum, total);
  return total[0] * per_n;
}

// Stores y as codes.
template <class H, bool kLayer, int N, class Row>
__device__ __forceinline__ void store_codes(const NormForwardArgs& a, int64_t row, const Row& held,
                                            const Split& mean, const Split& rstd) {
  float largest = 0;
  held.each([&](int col, const Vec<float, N>& h) {
    const auto v = normalised<H, kLayer>(a, col, h, mean, rstd);
#pragma unroll
    for (int k = 0; k < N; ++k) largest = larger_size(largest, v.at[k]);
  });
  const RowCodes codes(a.format, row_max(largest));
  held.each([&](int col, const Vec<float, N>& h) {
    codes.store(a.y, row * a.n + col, normalised<H, kLayer>(a, col, h, mean, rstd));
  });
  if (threadIdx.x == 0 && row < a.rows) a.scale[row] = codes.scale();
}

template <class H, bool kLayer, int N, class Row>
__device__ __forceinline__ void store_row(const NormForwardArgs& a, int64_t row, const Row& held,
                                          double mean, double rstd) {
  const Split mu(mean), r(rstd);
  held.each([&](int col, const Vec<float, N>& h) {
    store_floats(a.y, a.y_dtype, row * a.n + col, normalised<H, kLayer>(a, col, h, mu, r));
  });
}

template <bool kLayer>
__device__ __forceinline__ void store_statistics(const NormForwardArgs& a, int64_t row, double mean,
                                                 double rstd) {
  if constexpr (kLayer) a.mean[row] = mean;
  a.rstd[row] = rstd;
}

template <class H, bool kLayer, bool kCodes, int N, class Row>
__device__ __forceinline__ void normalise(const NormForwardArgs& a, int64_t row, const Row& held) {
  double mean = 0, variance;
  if constexpr (kLayer) {
    layer_moments<H, N>(held, a.per_n, mean, variance);
  } else {
    variance = mean_square<N>(held, a.per_n);
  }
  const double rstd = rsqrt(variance + a.eps);
  if constexpr (kCodes) {
    store_codes<H, kLayer, N>(a, row, held, Split(mean), Split(rstd));
    return;
  }
  store_row<H, kLayer, N>(a, row, held, mean, rstd);
  if (threadIdx.x == 0 && row < a.rows) store_statistics<kLayer>(a, row, mean, rstd);
}

// A multiprocessor holds two blocks of the longest rows: one loads while the other computes.
template <class H, bool kLayer, bool kCodes, bool kDrops>
__global__ void __launch_bounds__(kMaxThreads, 2) norm_forward_held(const NormForwardArgs a) {
  constexpr int N = 16 / sizeof(H);
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  normalise<H, kLayer, kCodes, N>(a, row, HeldRow<H, N, kDrops>(a, row));
}

// A part of a long row: what a block of kMaxThreads holds.
template <class H>
constexpr int kPart = kMaxThreads * kVectors * 16 / sizeof(H);

template <class H>
__device__ __forceinline__ Columns columns_of(const NormForwardArgs& a, int part) {
  const int begin = part * kPart<H>;
  return {begin, min(kPart<H>, a.n - begin)};
}

// Moments of a part: its mean (LayerNorm) and its sum of squares about it (RMSNorm: about 0).
template <class H, bool kLayer, bool kDrops>
__global__ void __launch_bounds__(kMaxThreads, 2)
    norm_forward_moments(const NormForwardArgs a, int parts) {
  constexpr int N = 16 / sizeof(H);
  const int64_t row = blockIdx.x / parts;
  const auto columns = columns_of<H>(a, blockIdx.x % parts);
  const HeldRow<H, N, kDrops> held(a, row, columns);
  const double per_n = 1.0 / columns.count;
  double mean = 0, variance;
  if constexpr (kLayer) {
    layer_moments<H, N>(held, per_n, mean, variance);
  } else {
    variance = mean_square<N>(held, per_n);
  }
  if (threadIdx.x != 0) return;
  double* const moments = a.moments + int64_t{blockIdx.x} * 2;
  moments[0] = mean;
  moments[1] = variance * columns.count;
}

// Joins the moments of a row's parts (Chan et al., 1979), and normalises one part.
template <class H, bool kLayer>
__global__ void __launch_bounds__(kMaxThreads, 2)
    norm_forward_parts(const NormForwardArgs a, int parts) {
  constexpr int N = 16 / sizeof(H);
  const int64_t row = blockIdx.x / parts;
  const int part = blockIdx.x % parts;
  const H* const kept = a.residual == nullptr ? static_cast<const H*>(a.x) + row * a.x_stride
                                              : static_cast<const H*>(a.h) + row * a.n;
  const HeldRow<H, N, false> held(kept, columns_of<H>(a, part));
  const double* const moments = a.moments + row * parts * 2;
  double mean = 0, squares = 0;
  if constexpr (kLayer) {
    for (int i = 0; i < parts; ++i) mean += moments[2 * i] * columns_of<H>(a, i).count;
    mean *= a.per_n;
  }
  for (int i = 0; i < parts; ++i) {
    const double off = kLayer ? moments[2 * i] - mean : 0;
    squares += moments[2 * i + 1] + off * off * columns_of<H>(a, i).count;
  }
  const double rstd = rsqrt(squares * a.per_n + a.eps);
  store_row<H, kLayer, N>(a, row, held, mean, rstd);
  if (threadIdx.x == 0 && part == 0) store_statistics<kLayer>(a, row, mean, rstd);
}

template <class H, bool kLayer, bool kCodes, int N>
__global__ void __launch_bounds__(kMaxThreads, 2)
    norm_forward_walked(const NormForwardArgs a, bool in_shared) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  normalise<H, kLayer, kCodes, N>(a, row, WalkedRow<H, N>(a, row, in_shared));
}

// Whether every access can have 16 bytes.
bool whole_vectors(const NormForwardArgs& a) {
  return int64_t{a.n} * size_of(a.h_dtype) % 16 == 0 && aligned_rows(a.x, a.x_stride, a.x_dtype) &&
         (a.residual == nullptr || aligned_rows(a.residual, a.residual_stride, a.h_dtype)) &&
         aligned(a.weight) && aligned(a.bias);
}

unsigned blocks_of(int64_t rows, dim3 block) {
  return static_cast<unsigned>((rows + block.y - 1) / block.y);
}

template <class H, bool kLayer, bool kCodes, int N>
void launch_walked(const NormForwardArgs& a, CUstream_st* stream) {
  const dim3 block = block_of(lanes_of(a.n, 4 * N), kThreads);
  const size_t bytes = sizeof(H) * a.n * block.y;
  const auto kernel = norm_forward_walked<H, kLayer, kCodes, N>;
  const bool in_shared = bytes <= max_shared_memory(kernel);
  launch(kernel, dim3(blocks_of(a.rows, block)), block, in_shared ? bytes : 0, stream, a,
         in_shared);
}

// Whether rows, or their parts, can be held in registers.
bool can_be_held(const NormForwardArgs& a) {
  return whole_vectors(a) && a.x_dtype == a.h_dtype &&
         (a.dropout.seed == nullptr || a.residual != nullptr);
}

template <class H, bool kLayer>
void launch_parts(const NormForwardArgs& a, CUstream_st* stream) {
  const auto parts = static_cast<int>(norm_parts(a));
  const auto blocks = static_cast<unsigned>(a.rows * parts);
  const auto moments = a.dropout.seed != nullptr ? norm_forward_moments<H, kLayer, true>
                                                 : norm_forward_moments<H, kLayer, false>;
  launch(moments, dim3(blocks), dim3(kMaxThreads), 0, stream, a, parts);
  launch(norm_forward_parts<H, kLayer>, dim3(blocks), dim3(kMaxThreads), 0, stream, a, parts);
}

template <class H, bool kLayer, bool kCodes>
void launch_forward(const NormForwardArgs& a, CUstream_st* stream) {
  constexpr int N = 16 / sizeof(H);
  if (!whole_vectors(a)) return launch_walked<H, kLayer, kCodes, 1>(a, stream);
  if constexpr (!kCodes) {
    if (norm_parts(a) > 1) return launch_parts<H, kLayer>(a, stream);
  }
  if (!can_be_held(a) || a.n > kPart<H>) return launch_walked<H, kLayer, kCodes, N>(a, stream);
  const bool drops = a.dropout.seed != nullptr;
  const dim3 block = block_of(lanes_of(a.n, kVectors * N), kThreads);
  const auto kernel = drops ? norm_forward_held<H, kLayer, kCodes, true>
                            : norm_forward_held<H, kLayer, kCodes, false>;
  launch(kernel, dim3(blocks_of(a.rows, block)), block, 0, stream, a);
}

}  // namespace

int64_t norm_parts(const NormForwardArgs& a) {
  const int64_t bytes = int64_t{a.n} * size_of(a.h_dtype), part = kMaxThreads * kVectors * 16;
  const int64_t parts = (bytes + part - 1) / part;
  return can_be_held(a) && a.rows * parts <= INT32_MAX ? parts : 1;
}

void launch_norm_forward(const NormForwardArgs& args, CUstream_st* stream) {
  for_dtype(args.h_dtype, [&](auto h) {
    using H = decltype(h);
    args.mean != nullptr ? launch_forward<H, true, false>(args, stream)
                         : launch_forward<H, false, false>(args, stream);
  });
}

void launch_rms_norm_codes(const NormForwardArgs& args, CUstream_st* stream) {
  for_dtype(args.h_dtype, [&](auto h) { launch_forward<decltype(h), false, true>(args, stream); });
}

}  // namespace fusedops::cuda::norm
