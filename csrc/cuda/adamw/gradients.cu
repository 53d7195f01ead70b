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

__global__ void __launch_bounds__(kThreads) adamw_squares(const AdamWRows rows, double* squares) {
  double sum = 0;
  each_block(rows, [&](int at, bool, int64_t block) {
    const auto& t = rows.tensors[at];
    with_gradients(t, block, [&](auto elements) {
      const auto g = elements.load(t.grad, t.dtype, block * kAdamWBlock);
      float part = 0;
#pragma unroll
      for (int k = 0; k < kEach; ++k) part = fmaf(g.at[k], g.at[k], part);
      sum += part;
    });
  });
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
  FUSEDOPS_SHARED(double, of_warps, kWarps);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) sum += of_warps[w];
  squares[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    adamw_scale(const AdamWRows rows, const double* squares, double max_norm) {
  const double factor = max_norm / (sqrt(sum_of_parts(squares)) + 1e-6);
  if (factor >= 1) return;  // but not for NaN, which the gradients become, as in torch
  const float by = static_cast<float>(factor);
  each_block(rows, [&](int at, bool, int64_t block) {
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
