// Gradient clipping: the sum of squares, and the scaling. blocks.cuh splits the work.

#include "csrc/cuda/adamw/blocks.cuh"

namespace fusedops::cuda::adamw {
namespace {

// Calls body for the elements of a block of gradients.
template <class Body>
__device__ __forceinline__ void with_gradients(const AdamWTensor& t, int64_t block,
                                               const Body& body) {
  const int64_t rest = t.numel - block * kAdamWBlock;
  if (rest >= kAdamWBlock && reinterpret_cast<uintptr_t>(t.grad) % 16 == 0) {
    body(Elements<true>{kAdamWBlock});
  } else {
    body(Elements<false>{static_cast<int>(min(rest, int64_t{kAdamWBlock}))});
  }
}

// The squares have only kSquareParts blocks of threads. One load per thread would not hide memory's
// latency, so each warp loads this many blocks of gradients before it adds.
constexpr int kInFlight = 4;

__device__ __forceinline__ float squares_of(const Lane& g) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) sum = fmaf(g.at[k], g.at[k], sum);
  return sum;
}

// Returns the squares of a lane's elements of kInFlight whole blocks, kWarps apart, at addresses
// that are multiples of 16 bytes. All loads come before the first sum.
template <class T>
__device__ __forceinline__ double squares_in_flight(const void* grad, int64_t block) {
  const auto* const from = static_cast<const T*>(grad) + block * kAdamWBlock;
  Vec<T, kEach> loaded[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    loaded[i] = Elements<true>{kAdamWBlock}.load(from + i * kWarps * kAdamWBlock);
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) sum += squares_of(converted<float>(loaded[i]));
  return sum;
}

__global__ void __launch_bounds__(kThreads) adamw_squares(const AdamWRows rows, double* squares) {
  double sum = 0;
  const auto add_block = [&](int at, int64_t block) {
    const auto& t = rows.tensors[at];
    with_gradients(t, block, [&](auto elements) {
      sum += squares_of(elements.load(t.grad, t.dtype, block * kAdamWBlock));
    });
  };
  each_blocks<kInFlight>(rows, add_block, [&](int at, int64_t block) {
    const auto& t = rows.tensors[at];
    if (reinterpret_cast<uintptr_t>(t.grad) % 16 != 0) {
      for (int i = 0; i < kInFlight; ++i) add_block(at, block + i * kWarps);
      return;
    }
    switch (t.dtype) {
      case Dtype::float32: sum += squares_in_flight<float>(t.grad, block); break;
      case Dtype::bfloat16: sum += squares_in_flight<BFloat16>(t.grad, block); break;
      default: sum += squares_in_flight<Half>(t.grad, block);
    }
  });
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
  FUSEDOPS_SHARED(double, warp_sums, kWarps);
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) sum += warp_sums[w];
  squares[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    adamw_scale(const AdamWRows rows, const double* squares, double max_norm) {
  const double factor = max_norm / (sqrt(sum_of_parts(squares)) + 1e-6);
  if (factor >= 1) return;  // but not for NaN, which the gradients become, as in torch
  const float by = static_cast<float>(factor);
  each_block(rows, [&](int at, int64_t block) {
    const auto& t = rows.tensors[at];
    with_gradients(t, block, [&](auto elements) {
      auto g = elements.load(t.grad, t.dtype, block * kAdamWBlock);
#pragma unroll
      for (int k = 0; k < kEach; ++k) g.at[k] *= by;
      elements.store(const_cast<void*>(t.grad), t.dtype, block * kAdamWBlock, g);
    });
  });
}

}  // namespace

void launch_adamw_squares(const AdamWRows& rows, double* squares, CUstream_st* stream) {
  launch(adamw_squares, dim3(kSquareParts), dim3(kThreads), 0, stream, rows, squares);
}

void launch_adamw_scale(const AdamWRows& rows, const double* squares, double max_norm,
                        CUstream_st* stream) {
  launch(adamw_scale, grid_of(rows), dim3(kThreads), 0, stream, rows, squares, max_norm);
}

}  // namespace fusedops::cuda::adamw
