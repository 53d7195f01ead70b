// Toy CUDA kernels, some with a fault that the machine-code checks must detect.

#include <cuda_bf16.h>
#include <mma.h>

namespace toys {

enum class Way { up, down };

template <class T, Way kWay, bool kTwice>
__global__ void vectors(const T* x, T* y) {
  const int i = threadIdx.x;
  const uint4 word = reinterpret_cast<const uint4*>(x)[i];
  reinterpret_cast<uint4*>(y)[kWay == Way::up ? i : blockDim.x - i] = word;
  if constexpr (kTwice) reinterpret_cast<uint4*>(y)[blockDim.x + i] = word;
}
template __global__ void vectors<float, Way::down, true>(const float*, float*);

__global__ void elements(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }

// The index is known only at run time, so registers cannot hold the array.
__global__ void local_array(const float* x, float* y, int k) {
  float a[64];
  for (int i = 0; i < 64; ++i) a[(i * k) % 64] = x[i * 32 + threadIdx.x];
  for (int i = 0; i < 64; ++i) y[i * 32 + threadIdx.x] = a[(i + k) % 64];
}

// Keeps 96 values, although the launch bounds leave only 32 registers.
__global__ void __launch_bounds__(1024, 2) spill(const float* x, float* y) {
  float a[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) y[i * 1024 + threadIdx.x] = a[95 - i] * a[i];
}

__global__ void dot(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
  using namespace nvcuda::wmma;
  __shared__ float start[32];
  start[threadIdx.x] = c[threadIdx.x];
  __syncthreads();
  fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major> of_a;
  fragment<matrix_b, 16, 16, 16, __nv_bfloat16, col_major> of_b;
  fragment<accumulator, 16, 16, 16, float> sum;
  fill_fragment(sum, start[31 - threadIdx.x]);
  load_matrix_sync(of_a, a, 16);
  load_matrix_sync(of_b, b, 16);
  mma_sync(sum, of_a, of_b, sum);
  store_matrix_sync(c, sum, 16, mem_row_major);
}

}  // namespace toys
