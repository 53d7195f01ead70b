// What only a GPU has: launches, shared memory, 16-byte accesses, the device's limits. On a CPU
// csrc/simt/simt.h gives the same names.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace fusedops::cuda {

using Stream = cudaStream_t;

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next caller is told of it again
  throw std::runtime_error(std::string("fusedops: ") + what + ": " + cudaGetErrorString(status));
}

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// kernel<<<grid, block, smem, stream>>>(args...)
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem, Stream stream,
            Args... args) {
  if (smem > 48 * 1024) {  // what a block gets without asking
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem)),
          "cudaFuncSetAttribute");
  }
  kernel<<<grid, block, smem, stream>>>(Parameters(args)...);
  check(cudaGetLastError(), "launch");
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, current_device()), "cudaDeviceGetAttribute");
  return value;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Bytes of shared memory that a block may have.
inline size_t max_shared_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// The shared memory that the launch asked for.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 fusedops_dynamic_shared[];  // 16-byte aligned
  return reinterpret_cast<T*>(fusedops_dynamic_shared);
}

__device__ __forceinline__ uint4 load_16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store_16(void* p, uint4 word) { *static_cast<uint4*>(p) = word; }

}  // namespace fusedops::cuda

// T name[count], one for the block.
#define FUSEDOPS_SHARED(T, name, count) __shared__ T name[count]
