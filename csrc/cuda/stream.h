// The device of csrc/cuda's kernels: a GPU, with its device guard and current stream, or the
// emulator of csrc/simt, with CPU tensors and a dispatch key that nothing else here uses.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(FUSEDOPS_SIMT)

#define FUSEDOPS_CUDA_KEY PrivateUse1

#include <cstring>

struct CUstream_st;  // *cudaStream_t

namespace fusedops::cuda {

struct OnDeviceOf {
  explicit OnDeviceOf(const at::Tensor&) {}
  CUstream_st* stream() const { return nullptr; }
  void copy_from_host(void* to, const void* from, size_t bytes) const {
    std::memcpy(to, from, bytes);
  }
};

inline bool capturing() { return false; }

}  // namespace fusedops::cuda

#else

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#define FUSEDOPS_CUDA_KEY CUDA

namespace fusedops::cuda {

// Makes a tensor's device the current one during this object's lifetime.
struct OnDeviceOf {
  explicit OnDeviceOf(const at::Tensor& t) : guard(t.device()) {}
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(); }
  // Copies in stream order. `from` may change after it returns, unless a graph is being captured.
  void copy_from_host(void* to, const void* from, size_t bytes) const {
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream()));
  }

  c10::cuda::CUDAGuard guard;
};

// Whether a CUDA graph is being captured.
inline bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace fusedops::cuda

#endif
