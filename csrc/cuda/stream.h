// Selects the device and stream of csrc/cuda's kernels, and copies host memory to the device: a GPU
// or, with the dispatch key PrivateUse1, the emulator of csrc/simt on CPU tensors.
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

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#define FUSEDOPS_CUDA_KEY CUDA

namespace fusedops::cuda {

// Whether a CUDA graph is being captured.
inline bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// Pinned memory. A capture forbids allocations by default, but this one does no work on the device.
inline c10::DataPtr pinned(size_t bytes) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  return at::getHostAllocator(at::kCUDA)->allocate(bytes);
}

// Never frees this memory. A plain static would free it after CUDA has shut down.
inline void keep(c10::DataPtr memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<c10::DataPtr>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

// Makes a tensor's device the current one during this object's lifetime.
struct OnDeviceOf {
  explicit OnDeviceOf(const at::Tensor& t) : guard(t.device()) {}
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(); }
  // Copies in stream order; `from` may change after it returns. Goes through pinned memory, because
  // copying more than 64 KiB of other memory waits for the stream. A CUDA graph copies again at
  // each replay, so while one is captured that memory is kept.
  void copy_from_host(void* to, const void* from, size_t bytes) const {
    auto staged = pinned(bytes);
    std::memcpy(staged.get(), from, bytes);
    C10_CUDA_CHECK(cudaMemcpyAsync(to, staged.get(), bytes, cudaMemcpyHostToDevice, stream()));
    if (capturing()) return keep(std::move(staged));
    const c10::Stream current = c10::cuda::getCurrentCUDAStream();
    at::getHostAllocator(at::kCUDA)->record_event(staged.get(), staged.get_context(), current);
  }

  c10::cuda::CUDAGuard guard;
};

}  // namespace fusedops::cuda

#endif
