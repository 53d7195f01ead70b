// Marks the functions of csrc/kernels that CPU and CUDA code call.
#pragma once

#if defined(__CUDACC__)
#define FUSEDOPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSEDOPS_HOST_DEVICE inline
#endif
