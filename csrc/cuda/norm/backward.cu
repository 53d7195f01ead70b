// RMSNorm's and LayerNorm's backward on GPUs. Forward: h = residual + dropout(x), y = norm(h).
// v: the normalised h, g: dy weight.
//   dresidual = (g - mean(g) - v mean(g v)) rstd + dh      RMSNorm: without mean(g)
//   dx = dropout(dresidual), dweight = sum of dy v, dbias = sum of dy over the rows.
//
// The blocks that the device holds at a time, or a multiple of them, walk over the rows: no block
// sums more than kAdded rows in float32. blockDim.x threads share a row, as in forward.cu.
// The next row is loaded while one is computed. A thread keeps its columns of dweight and dbias
// in registers, or in shared memory if rows have over 16 KiB; each block writes its sums once, in
// float32, and sum_chunks adds these up in a fixed order. Rows of over 32 KiB, without 16-byte
// alignment or of two dtypes are read twice, and their sums wait in shared memory,
// or in the block's part of `partials` where they do not fit.

#include <algorithm>

#include "csrc/cuda/norm/row.cuh"
#include "csrc/cuda/norm/sums.cuh"

namespace fusedops::cuda::norm {
namespace {

constexpr int kThreads = 256;  // minimum threads per block
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

template <class H>
__device__ __forceinline__ const H* dy_at(const NormBackwardArgs& a, int64_t row, int col) {
  return static_cast<const H*>(a.dy) + row * a.dy_stride + col;
}

template <class H>
__device__ __forceinline__ const H* h_at(const NormBackwardArgs& a, int64_t row, int col) {
  return static_cast<const H*>(a.h) + row * a.h_stride + col;
}

template <class H>
__device__ __forceinline__ const H* dh_at(const NormBackwardArgs& a, int64_t row, int col) {
  return static_cast<const H*>(a.dh) + row * a.dh_stride + col;
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
template <int kVectors>
struct HeldRow {
  Statistics statistics;
  Packed<16> dy[kVectors], h[kVectors];
};

// The next row, loaded ahead, in registers. dh is loaded late: two rows of it would be too much.
template <class H, bool kLayer>
class RegisterRow {
 public:
  __device__ __forceinline__ explicit RegisterRow(const NormBackwardArgs&) {}

  __device__ __forceinline__ void load(const NormBackwardArgs& a, int64_t row) {
    row_.statistics = Statistics::load<kLayer>(a, row);
    each_held<N, kFew>(row < a.rows ? a.n : 0, [&](int i, int col) {
      row_.dy[i] = Packed<16>::load(dy_at<H>(a, row, col));
      row_.h[i] = Packed<16>::load(h_at<H>(a, row, col));
    });
  }

  __device__ __forceinline__ HeldRow<kFew> arrived() const { return row_; }

  __device__ __forceinline__ void load_dh(const NormBackwardArgs& a, int64_t row, int n) {
#pragma unroll
    for (auto& words : dh_) words = {};  // so no register keeps the last row's
    if (a.dh == nullptr) return;
    each_held<N, kFew>(n,
                       [&](int i, int col) { dh_[i] = Packed<16>::load(dh_at<H>(a, row, col)); });
  }

  __device__ __forceinline__ Packed<16> dh(const NormBackwardArgs&, int i) const { return dh_[i]; }

  __device__ __forceinline__ void wait_for_dh() const {}

 private:
  static constexpr int N = 16 / sizeof(H);

  HeldRow<kFew> row_;
  Packed<16> dh_[kFew];
};

// The same with dh and the next row in shared memory, before the block's sums. A thread reads only
// what it has loaded.
template <class H, bool kLayer>
class SharedRow {
 public:
  static constexpr size_t kBytes = 3 * kMany * sizeof(uint4) * kMaxThreads;

  __device__ __forceinline__ explicit SharedRow(const NormBackwardArgs&)
      : first_(dynamic_shared<uint4>() + threadIdx.x) {}

  __device__ __forceinline__ void load(const NormBackwardArgs& a, int64_t row) {
    statistics_ = Statistics::load<kLayer>(a, row);
    n_ = row < a.rows ? a.n : 0;
    each_long<N>(n_, [&](int i, int col) {
      copy_to_shared(at(i, 0), dy_at<H>(a, row, col));
      copy_to_shared(at(i, 1), h_at<H>(a, row, col));
    });
    end_copies();
  }

  __device__ __forceinline__ HeldRow<kMany> arrived() const {
    HeldRow<kMany> row{statistics_};
    wait_for_copies<0>();
    each_long<N>(n_, [&](int i, int) {
      row.dy[i] = Packed<16>::load(at(i, 0));
      row.h[i] = Packed<16>::load(at(i, 1));
    });
    return row;
  }

  // Comes before the next row's load.
  __device__ __forceinline__ void load_dh(const NormBackwardArgs& a, int64_t row, int n) {
    if (a.dh != nullptr) {
      each_long<N>(n, [&](int i, int col) { copy_to_shared(at(i, 2), dh_at<H>(a, row, col)); });
    }
    end_copies();
  }

  __device__ __forceinline__ void wait_for_dh() const { wait_for_copies<1>(); }

  __device__ __forceinline__ Packed<16> dh(const NormBackwardArgs& a, int i) const {
    return a.dh == nullptr ? Packed<16>{} : Packed<16>::load(at(i, 2));
  }

 private:
  static constexpr int N = 16 / sizeof(H);

  __device__ __forceinline__ uint4* at(int i, int which) const {
    return first_ + (3 * i + which) * kMaxThreads;
  }

  uint4* const first_;
  Statistics statistics_;
  int n_;
};

template <class H, int N>
__device__ __forceinline__ Vec<float, N> floats(const Packed<16>& packed) {
  return converted<float>(Vec<H, N>::of(packed));
}

// kDrops: dx is requested.
template <class H, bool kLayer, int kVectors, bool kDrops>
__global__ void __launch_bounds__(kMaxThreads) norm_backward_held(const NormBackwardArgs a) {
  constexpr int N = 16 / sizeof(H);
  std::conditional_t<kVectors == kFew, RegisterSums<N>, SharedSums<N>> sums(
      a, dynamic_shared<float>() + SharedRow<H, kLayer>::kBytes / sizeof(float));
  const auto each = [](int n, const auto& body) {
    kVectors == kFew ? each_held<N, kFew>(n, body) : each_long<N>(n, body);
  };
  const int64_t step = int64_t{gridDim.x} * blockDim.y;

  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  std::conditional_t<kVectors == kFew, RegisterRow<H, kLayer>, SharedRow<H, kLayer>> next(a);
  next.load(a, row);
  for (; row - threadIdx.y < a.rows; row += step) {  // the same for the whole block
    const auto now = next.arrived();
    const int n = row < a.rows ? a.n : 0;
    next.load_dh(a, row, n);
    next.load(a, row + step);
    RowGradient<H, kLayer, N> gradient(a, now.statistics);
    each(n, [&](int i, int col) {
      sums.update(i, [&](auto& dweight, auto& dbias) {
        gradient.add(col, floats<H, N>(now.dy[i]), Vec<H, N>::of(now.h[i]), dweight, dbias);
      });
    });
    if (!kDrops && a.dresidual == nullptr) continue;
    const Mask mask(a.dropout);  // its load arrives during the sums
    gradient.sum();
    next.wait_for_dh();
    each(n, [&](int i, int col) {
      const auto dh = floats<H, N>(next.dh(a, i));
      auto d = gradient.at(col, floats<H, N>(now.dy[i]), Vec<H, N>::of(now.h[i]), dh);
      const int64_t at = row * a.n + col;
      if (a.dresidual != nullptr) converted<H>(d).store(static_cast<H*>(a.dresidual) + at);
      if constexpr (kDrops) {
        mask.drop(d, row, col);
        converted<H>(d).store(static_cast<H*>(a.dx) + at);
      }
    });
  }

  if (a.partials == nullptr) return;
  const int count = a.wants_dweight + a.wants_dbias;
  float* const mine = blockDim.y == 1 ? a.partials + int64_t{blockIdx.x} * count * a.n
                                      : dynamic_shared<float>() + threadIdx.y * count * a.n;
  each(a.n, [&](int i, int col) {
    sums.update(i, [&](const auto& dweight, const auto& dbias) {
      if (a.wants_dweight) dweight.store(mine + col);
      if (a.wants_dbias) dbias.store(mine + (count - 1) * a.n + col);
    });
  });
  if (blockDim.y != 1) write_partials(a, dynamic_shared<float>());
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

  const Mask mask(a.dropout);
  const bool wants_rows = a.dresidual != nullptr || a.dx != nullptr;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  for (; row - threadIdx.y < a.rows; row += int64_t{gridDim.x} * blockDim.y) {
    const int n = row < a.rows ? a.n : 0;
    const auto dy_of = [&](int col) {
      return load_floats<N>(a.dy, a.dy_dtype, row * a.dy_stride + col);
    };
    const auto h_of = [&](int col) { return Vec<H, N>::load(h_at<H>(a, row, col)); };
    RowGradient<H, kLayer, N> gradient(a, Statistics::load<kLayer>(a, row));
    each(n, [&](int col) {
      Vec<float, N> weight_grad{}, bias_grad{};
      gradient.add(col, dy_of(col), h_of(col), weight_grad, bias_grad);
      accumulate(dweight == nullptr ? nullptr : dweight + col, weight_grad);
      accumulate(dbias == nullptr ? nullptr : dbias + col, bias_grad);
    });
    if (!wants_rows) continue;
    gradient.sum();
    each(n, [&](int col) {
      Vec<float, N> dh{};
      if (a.dh != nullptr) dh = converted<float>(Vec<H, N>::load(dh_at<H>(a, row, col)));
      auto d = gradient.at(col, dy_of(col), h_of(col), dh);
      const int64_t at = row * a.n + col;
      if (a.dresidual != nullptr) converted<H>(d).store(static_cast<H*>(a.dresidual) + at);
      if (a.dx == nullptr) return;
      mask.drop(d, row, col);
      converted<H>(d).store(static_cast<H*>(a.dx) + at);
    });
  }
  if (a.partials != nullptr && in_shared) write_partials(a, dynamic_shared<float>());
}

// A thread of a warp takes one column and every kParts-th chunk of it: 9 loads on an H100.
constexpr int kParts = 32;

__global__ void __launch_bounds__(kWarp* kParts)
    sum_chunks(const float* partials, int64_t chunks, int n, const NormTotals totals) {
  FUSEDOPS_SHARED(double, parts, kParts* kWarp);
  const int col = blockIdx.x * kWarp + threadIdx.x, sum = blockIdx.y;
  double total = 0;
  if (col < n) {
#pragma unroll 4
    for (int64_t c = threadIdx.y; c < chunks; c += kParts) {
      total += partials[(c * totals.count + sum) * n + col];
    }
  }
  double* const mine = parts + threadIdx.y * kWarp + threadIdx.x;
  *mine = total;
  for (unsigned half = kParts / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) *mine += mine[half * kWarp];
  }
  if (threadIdx.y != 0 || col >= n) return;
  const Vec<float, 1> v{{static_cast<float>(*mine)}};
  store_floats(sum == 0 ? totals.out[0] : totals.out[1],
               sum == 0 ? totals.dtype[0] : totals.dtype[1], col, v);
}

// Whether every access can have 16 bytes.
bool whole_vectors(const NormBackwardArgs& a) {
  return int64_t{a.n} * size_of(a.h_dtype) % 16 == 0 &&
         aligned_rows(a.dy, a.dy_stride, a.dy_dtype) && aligned_rows(a.h, a.h_stride, a.h_dtype) &&
         (a.dh == nullptr || aligned_rows(a.dh, a.dh_stride, a.h_dtype)) && aligned(a.weight);
}

// The rows' split: which kernel runs, with which block and shared memory.
struct Layout {
  bool whole;  // every access has 16 bytes
  int held;    // vectors that a thread keeps; 0: the rows are walked
  dim3 block;
  size_t bytes;
};

// Returns the size in bytes of the sums of a block's concurrent rows of n columns.
size_t bytes_of_sums(const NormBackwardArgs& a, int64_t n, dim3 block) {
  return sizeof(float) * (a.wants_dweight + a.wants_dbias) * n * block.y;
}

template <class H, bool kLayer>
auto held_kernel(const NormBackwardArgs& a, int vectors) {
  if (a.dx != nullptr) {
    return vectors == kFew ? norm_backward_held<H, kLayer, kFew, true>
                           : norm_backward_held<H, kLayer, kMany, true>;
  }
  return vectors == kFew ? norm_backward_held<H, kLayer, kFew, false>
                         : norm_backward_held<H, kLayer, kMany, false>;
}

template <class H, bool kLayer>
Layout layout_of(const NormBackwardArgs& a) {
  constexpr int N = 16 / sizeof(H);
  const bool whole = whole_vectors(a);
  const bool plain = whole && a.dy_dtype == a.h_dtype;
  const auto block_for = [&](int each) { return block_of(lanes_of(a.n, each), kThreads); };
  if (plain && a.n <= kMaxThreads * kFew * N) {
    const dim3 block = block_for(kFew * N);
    return {true, kFew, block, block.y == 1 ? 0 : bytes_of_sums(a, a.n, block)};
  }
  if (plain && a.n <= kMaxThreads * kMany * N) {
    const dim3 block = block_for(kMany * N);
    const size_t bytes =
        SharedRow<H, kLayer>::kBytes + bytes_of_sums(a, SharedSums<N>::size(a.n), block);
    if (bytes <= max_shared_memory(held_kernel<H, kLayer>(a, kMany))) {
      return {true, kMany, block, bytes};
    }
  }
  const dim3 block = block_for(4 * (whole ? N : 1));
  return {whole, 0, block, bytes_of_sums(a, a.n, block)};
}

template <class H, bool kLayer, int N>
void launch_walked(const NormBackwardArgs& a, dim3 grid, const Layout& layout,
                   CUstream_st* stream) {
  const auto kernel = norm_backward_walked<H, kLayer, N>;
  const bool in_shared = layout.bytes <= max_shared_memory(kernel);  // if rows share a block: true
  launch(kernel, grid, layout.block, in_shared ? layout.bytes : 0, stream, a, in_shared);
}

template <class H, bool kLayer>
void launch_backward(const NormBackwardArgs& a, CUstream_st* stream) {
  const auto layout = layout_of<H, kLayer>(a);
  const dim3 grid(static_cast<unsigned>(norm_chunks(a)));
  if (layout.held == 0) {
    return layout.whole ? launch_walked<H, kLayer, 16 / sizeof(H)>(a, grid, layout, stream)
                        : launch_walked<H, kLayer, 1>(a, grid, layout, stream);
  }
  launch(held_kernel<H, kLayer>(a, layout.held), grid, layout.block, layout.bytes, stream, a);
}

// Calls f(h, layer): h is of h's dtype, layer::value is false for RMSNorm.
template <class Function>
auto for_kind(const NormBackwardArgs& a, const Function& f) {
  return for_dtype(a.h_dtype, [&](auto h) {
    return a.mean != nullptr ? f(h, std::true_type{}) : f(h, std::false_type{});
  });
}

}  // namespace

int64_t norm_chunks(const NormBackwardArgs& args) {
  const Layout layout =
      for_kind(args, [&](auto h, auto layer) { return layout_of<decltype(h), layer.value>(args); });
  const dim3 block = layout.block;
  const int64_t threads = layout.held == 0 ? 2 * kMaxThreads : kMaxThreads;  // resident at a time
  const int64_t resident = multiprocessors() * threads / (block.x * block.y);
  const int64_t blocks = (args.rows + block.y - 1) / block.y;
  const int64_t rounds = (blocks + resident * kAdded - 1) / (resident * kAdded);
  return std::min(blocks, resident * rounds);
}

void launch_norm_backward(const NormBackwardArgs& args, CUstream_st* stream) {
  for_kind(args,
           [&](auto h, auto layer) { launch_backward<decltype(h), layer.value>(args, stream); });
}

void launch_norm_sums(const float* partials, int64_t chunks, int n, const NormTotals& totals,
                      CUstream_st* stream) {
  const dim3 grid((n + kWarp - 1) / kWarp, totals.count);
  launch(sum_chunks, grid, dim3(kWarp, kParts), 0, stream, partials, chunks, n, totals);
}

}  // namespace fusedops::cuda::norm
