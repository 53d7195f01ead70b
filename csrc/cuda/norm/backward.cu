// The norm family's backward on GPUs. Forward: h = residual + dropout(x), y = norm(h).
// v: the normalised h, g: dy weight.
//   dresidual = (g - mean(g) - v mean(g v)) rstd + dh      RMSNorm: without mean(g)
//   dx = dropout(dresidual), dweight = sum of dy v, dbias = sum of dy over the rows.
//
// The blocks that the device holds at a time, or a multiple of them, walk over the rows: no block
// sums more than kAdded rows in float32. blockDim.x threads share a row, as in forward.cu.
// The next row is loaded while one is computed. A thread keeps its columns of dweight and dbias
// in registers; each block writes its sums once, in float32, and sum_chunks adds these up in
// a fixed order. Rows of over 16 KiB, without 16-byte alignment, with a dropout or of two dtypes
// are read twice, and their sums wait in shared memory, or in the block's part of `partials` where
// they do not fit.

#include <algorithm>

#include "csrc/cuda/norm/row.cuh"

namespace fusedops::cuda::norm {
namespace {

constexpr int kThreads = 256;  // minimum threads per block
constexpr int kVectors = 2;    // 16-byte vectors of a row that a thread keeps
constexpr int kAdded = 64;     // rows summed in float32

// A row's statistics, in the form that its elements need.
struct Statistics {
  double mean, rstd;

  template <bool kLayer>
  __device__ __forceinline__ static Statistics load(const NormBackwardArgs& a, int64_t row) {
    if (row >= a.rows) return {0, 0};
    return {kLayer ? a.mean[row] : 0, a.rstd[row]};
  }
};

template <int N>
__device__ __forceinline__ Vec<float, N> weighted(const NormBackwardArgs& a, Vec<float, N> dy,
                                                  int col) {
  multiply_by_weight(dy, a.weight, a.weight_dtype, a.offset, col);
  return dy;
}

template <class H, int N>
__device__ __forceinline__ Packed<sizeof(H) * N> load_h(const NormBackwardArgs& a, int64_t row,
                                                        int col) {
  return Packed<sizeof(H) * N>::load(static_cast<const H*>(a.h) + row * a.h_stride + col);
}

template <class H, int N>
__device__ __forceinline__ Packed<sizeof(H) * N> load_dh(const NormBackwardArgs& a, int64_t row,
                                                         int col) {
  return Packed<sizeof(H) * N>::load(static_cast<const H*>(a.dh) + row * a.dh_stride + col);
}

// Computes a row's gradient: call `add` for its columns, then `sum`, then `at` for its columns.
template <class H, bool kLayer, int N>
class RowGradient {
 public:
  __device__ __forceinline__ RowGradient(const NormBackwardArgs& a, const Statistics& statistics)
      : a_(a), mean_(statistics.mean), rstd_(statistics.rstd), mean_g_(0) {}

  // Adds N columns to the row's sums, and to dweight and dbias.
  __device__ __forceinline__ void add(int col, const Vec<float, N>& dy, const Vec<H, N>& h,
                                      Vec<float, N>& dweight, Vec<float, N>& dbias) {
    const auto g = weighted(a_, dy, col);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float v = scaled<H>(centred<kLayer, H>(float(h.at[k]), mean_), rstd_);
      sums_[0] = fmaf(g.at[k], v, sums_[0]);
      if constexpr (kLayer) sums_[1] += g.at[k];
      dweight.at[k] = fmaf(dy.at[k], v, dweight.at[k]);
      dbias.at[k] += dy.at[k];
    }
  }

  __device__ __forceinline__ void sum() {
    double totals[kSums];
    row_sums(sums_, totals);
    slope_ = static_cast<float>(-totals[0] * a_.per_n) * rstd_.high;
    if constexpr (kLayer) mean_g_ = Split(totals[1] * a_.per_n);
    // an infinite gradient times rstd's second part must not change its sign
    if (fabs(totals[0]) == INFINITY || fabs(totals[kSums - 1]) == INFINITY) {
      rstd_.low = rstd_.high;
    }
  }

  // Returns dresidual for N columns.
  __device__ __forceinline__ Vec<float, N> at(int col, const Vec<float, N>& dy, const Vec<H, N>& h,
                                              const Vec<float, N>& dh) const {
    auto d = weighted(a_, dy, col);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float c = centred<kLayer, H>(float(h.at[k]), mean_);
      const float along = fmaf(c, slope_, centred<kLayer, H>(d.at[k], mean_g_));
      d.at[k] = scaled<H>(along, rstd_) + dh.at[k];
    }
    return d;
  }

 private:
  static constexpr int kSums = kLayer ? 2 : 1;

  const NormBackwardArgs& a_;
  const Split mean_;
  Split rstd_;
  float sums_[kSums] = {};
  float slope_ = 0;  // multiplies h - mean
  Split mean_g_;
};

// A row's vectors, as loaded.
template <class H, bool kLayer, int N>
struct Loaded {
  Statistics statistics;
  Packed<16> dy[kVectors], h[kVectors];

  __device__ __forceinline__ Loaded(const NormBackwardArgs& a, int64_t row)
      : statistics(Statistics::load<kLayer>(a, row)) {
    each_held<N, kVectors>(row < a.rows ? a.n : 0, [&](int i, int col) {
      dy[i] = Packed<16>::load(static_cast<const H*>(a.dy) + row * a.dy_stride + col);
      h[i] = load_h<H, N>(a, row, col);
    });
  }
};

template <class H, int N>
__device__ __forceinline__ Vec<float, N> floats(const Packed<16>& packed) {
  return converted<float>(Vec<H, N>::of(packed));
}

// partials[blockIdx.x, s, :] = the sum over y of shared[y, s, :], for each of the sums
__device__ __forceinline__ void write_partials(const NormBackwardArgs& a, const float* shared) {
  const int width = (a.wants_dweight + a.wants_dbias) * a.n;
  float* const out = a.partials + int64_t{blockIdx.x} * width;
  __syncthreads();
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < width; i += blockDim.x * blockDim.y) {
    double total = 0;
    for (unsigned y = 0; y < blockDim.y; ++y) total += shared[y * width + i];
    out[i] = static_cast<float>(total);
  }
}

template <class H, bool kLayer>
__global__ void __launch_bounds__(kMaxThreads) norm_backward_held(const NormBackwardArgs a) {
  constexpr int N = 16 / sizeof(H);
  Vec<float, N> dweight[kVectors] = {}, dbias[kVectors] = {};
  const int64_t step = int64_t{gridDim.x} * blockDim.y;

  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  Loaded<H, kLayer, N> next(a, row);
  for (; row - threadIdx.y < a.rows; row += step) {  // the same for the whole block
    const auto now = next;
    const int n = row < a.rows ? a.n : 0;
    Packed<16> dh[kVectors] = {};  // loaded late: two rows of dh would take too many registers
    if (a.dh != nullptr) {
      each_held<N, kVectors>(n, [&](int i, int col) { dh[i] = load_dh<H, N>(a, row, col); });
    }
    next = Loaded<H, kLayer, N>(a, row + step);
    RowGradient<H, kLayer, N> gradient(a, now.statistics);
    each_held<N, kVectors>(n, [&](int i, int col) {
      gradient.add(col, floats<H, N>(now.dy[i]), Vec<H, N>::of(now.h[i]), dweight[i], dbias[i]);
    });
    if (a.dresidual == nullptr) continue;
    gradient.sum();
    each_held<N, kVectors>(n, [&](int i, int col) {
      const auto d =
          gradient.at(col, floats<H, N>(now.dy[i]), Vec<H, N>::of(now.h[i]), floats<H, N>(dh[i]));
      converted<H>(d).store(static_cast<H*>(a.dresidual) + row * a.n + col);
    });
  }

  if (a.partials == nullptr) return;
  const int sums = a.wants_dweight + a.wants_dbias;
  float* const mine = blockDim.y == 1 ? a.partials + int64_t{blockIdx.x} * sums * a.n
                                      : dynamic_shared<float>() + threadIdx.y * sums * a.n;
  each_held<N, kVectors>(a.n, [&](int i, int col) {
    if (a.wants_dweight) dweight[i].store(mine + col);
    if (a.wants_dbias) dbias[i].store(mine + (sums - 1) * a.n + col);
  });
  if (blockDim.y != 1) write_partials(a, dynamic_shared<float>());
}

// Adds v to p[0..N), unless p is null.
template <int N>
__device__ __forceinline__ void accumulate(float* p, const Vec<float, N>& v) {
  if (p == nullptr) return;
  auto total = Vec<float, N>::load(p);
#pragma unroll
  for (int k = 0; k < N; ++k) total.at[k] += v.at[k];
  total.store(p);
}

template <class H, bool kLayer, int N>
__global__ void __launch_bounds__(kMaxThreads, 2)
    norm_backward_walked(const NormBackwardArgs a, bool in_shared) {
  const int sums = a.wants_dweight + a.wants_dbias;
  float* const mine = in_shared ? dynamic_shared<float>() + int64_t{threadIdx.y} * sums * a.n
                                : a.partials + int64_t{blockIdx.x} * sums * a.n;
  float* const dweight = a.wants_dweight ? mine : nullptr;
  float* const dbias = a.wants_dbias ? mine + int64_t{sums - 1} * a.n : nullptr;
  const int first = threadIdx.x * N, step = blockDim.x * N;
  const auto each = [&](int n, const auto& body) {
    for (int col = first; col < n; col += step) body(col);
  };
  each(a.n, [&](int col) {
    if (dweight != nullptr) Vec<float, N>{}.store(dweight + col);
    if (dbias != nullptr) Vec<float, N>{}.store(dbias + col);
  });

  const bool wants_rows = a.dresidual != nullptr || a.dx != nullptr;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  for (; row - threadIdx.y < a.rows; row += int64_t{gridDim.x} * blockDim.y) {
    const int n = row < a.rows ? a.n : 0;
    const auto dy_of = [&](int col) {
      return load_floats<N>(a.dy, a.dy_dtype, row * a.dy_stride + col);
    };
    const auto h_of = [&](int col) { return Vec<H, N>::of(load_h<H, N>(a, row, col)); };
    RowGradient<H, kLayer, N> gradient(a, Statistics::load<kLayer>(a, row));
    each(n, [&](int col) {
      Vec<float, N> of_weight{}, of_bias{};
      gradient.add(col, dy_of(col), h_of(col), of_weight, of_bias);
      accumulate(dweight == nullptr ? nullptr : dweight + col, of_weight);
      accumulate(dbias == nullptr ? nullptr : dbias + col, of_bias);
    });
    if (!wants_rows) continue;
    gradient.sum();
    each(n, [&](int col) {
      Vec<float, N> dh{};
      if (a.dh != nullptr) dh = converted<float>(Vec<H, N>::of(load_dh<H, N>(a, row, col)));
      auto d = gradient.at(col, dy_of(col), h_of(col), dh);
      const int64_t at = row * a.n + col;
      if (a.dresidual != nullptr) converted<H>(d).store(static_cast<H*>(a.dresidual) + at);
      if (a.dx == nullptr) return;
      drop(d, a.dropout, row, col);
      converted<H>(d).store(static_cast<H*>(a.dx) + at);
    });
  }
  if (a.partials != nullptr && in_shared) write_partials(a, dynamic_shared<float>());
}

// A thread of a warp takes one column and every kParts-th chunk of it.
constexpr int kParts = 8;

__global__ void __launch_bounds__(kWarp* kParts)
    sum_chunks(const float* partials, int64_t chunks, int n, const NormTotals totals) {
  FUSEDOPS_SHARED(double, parts, kParts* kWarp);
  const int col = blockIdx.x * kWarp + threadIdx.x, sum = blockIdx.y;
  double total = 0;
  if (col < n) {
    for (int64_t c = threadIdx.y; c < chunks; c += kParts) {
      total += partials[(c * totals.count + sum) * n + col];
    }
  }
  parts[threadIdx.y * kWarp + threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || col >= n) return;
  for (int y = 1; y < kParts; ++y) total += parts[y * kWarp + threadIdx.x];
  const Vec<float, 1> v{{static_cast<float>(total)}};
  store_floats(sum == 0 ? totals.out[0] : totals.out[1],
               sum == 0 ? totals.dtype[0] : totals.dtype[1], col, v);
}

// Whether every access can have 16 bytes.
bool whole_vectors(const NormBackwardArgs& a) {
  return int64_t{a.n} * size_of(a.h_dtype) % 16 == 0 &&
         aligned_rows(a.dy, a.dy_stride, a.dy_dtype) && aligned_rows(a.h, a.h_stride, a.h_dtype) &&
         (a.dh == nullptr || aligned_rows(a.dh, a.dh_stride, a.h_dtype)) && aligned(a.weight);
}

// The rows' split: which kernel runs, and its block.
struct Layout {
  bool whole, held;
  dim3 block;
};

Layout layout_of(const NormBackwardArgs& a) {
  const bool whole = whole_vectors(a);
  const int vector = whole ? 16 / size_of(a.h_dtype) : 1;
  const bool plain = a.dx == nullptr && a.dy_dtype == a.h_dtype;
  const bool held = whole && plain && a.n <= kMaxThreads * kVectors * vector;
  return {whole, held, block_of(lanes_of(a.n, (held ? kVectors : 4) * vector), kThreads)};
}

// Returns the size in bytes of the sums of a block's concurrent rows.
size_t bytes_of_sums(const NormBackwardArgs& a, dim3 block) {
  return sizeof(float) * (a.wants_dweight + a.wants_dbias) * size_t(a.n) * block.y;
}

template <class H, bool kLayer, int N>
void launch_walked(const NormBackwardArgs& a, dim3 grid, dim3 block, CUstream_st* stream) {
  const auto kernel = norm_backward_walked<H, kLayer, N>;
  const size_t bytes = bytes_of_sums(a, block);
  const bool in_shared = bytes <= max_shared_memory(kernel);  // always, where rows share a block
  launch(kernel, grid, block, in_shared ? bytes : 0, stream, a, in_shared);
}

template <class H, bool kLayer>
void launch_backward(const NormBackwardArgs& a, CUstream_st* stream) {
  const auto [whole, held, block] = layout_of(a);
  const dim3 grid(static_cast<unsigned>(norm_chunks(a)));
  if (!whole) return launch_walked<H, kLayer, 1>(a, grid, block, stream);
  if (!held) return launch_walked<H, kLayer, 16 / sizeof(H)>(a, grid, block, stream);
  launch(norm_backward_held<H, kLayer>, grid, block, block.y == 1 ? 0 : bytes_of_sums(a, block),
         stream, a);
}

}  // namespace

int64_t norm_chunks(const NormBackwardArgs& args) {
  const auto [whole, held, block] = layout_of(args);
  const int64_t threads = held ? kMaxThreads : 2 * kMaxThreads;  // of a multiprocessor at a time
  const int64_t resident = multiprocessors() * threads / (block.x * block.y);
  const int64_t blocks = (args.rows + block.y - 1) / block.y;
  const int64_t rounds = (blocks + resident * kAdded - 1) / (resident * kAdded);
  return std::min(blocks, resident * rounds);
}

void launch_norm_backward(const NormBackwardArgs& args, CUstream_st* stream) {
  for_dtype(args.h_dtype, [&](auto h) {
    using H = decltype(h);
    args.mean != nullptr ? launch_backward<H, true>(args, stream)
                         : launch_backward<H, false>(args, stream);
  });
}

void launch_norm_sums(const float* partials, int64_t chunks, int n, const NormTotals& totals,
                      CUstream_st* stream) {
  const dim3 grid((n + kWarp - 1) / kWarp, totals.count);
  launch(sum_chunks, grid, dim3(kWarp, kParts), 0, stream, partials, chunks, n, totals);
}

}  // namespace fusedops::cuda::norm
