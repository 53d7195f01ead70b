// Where the kernels of csrc/cuda run: on a GPU, with its device guard and current stream, or in the
// emulator of csrc/simt, on CPU tensors, under a dispatch key that has no other user here.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(FUSEDOPS_SIMT)

#define FUSEDOPS_CUDA_KEY PrivateUse1

struct CUstream_st;  // *cudaStream_t

namespace fusedops::cuda {

struct OnDeviceOf {
  explicit OnDeviceOf(const at::Tensor&) {}
  CUstream_st* stream() const { return nullptr; }
};

}  // namespace fusedops::cuda

#else

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#define FUSEDOPS_CUDA_KEY CUDA

namespace fusedops::cuda {

// Makes a tensor's device the current one while it lives.
struct OnDeviceOf {
  explicit OnDeviceOf(const at::Tensor& t) : guard(t.device()) {}
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(); }

  c10::cuda::CUDAGuard guard;
};

}  // namespace fusedops::cuda

#endif
