// Defines the macro that marks functions for both CPU and CUDA code.
#pragma once

#if defined(__CUDACC__)
#define FUSEDOPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSEDOPS_HOST_DEVICE inline
#endif
