// The rotary embedding on GPUs: the launcher of kernels.cu.
#pragma once

#include "csrc/kernels/rotary.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda::rotary {

using namespace fusedops::rotary;

void launch_rotary(const RotaryArguments& args, CUstream_st* stream);

}  // namespace fusedops::cuda::rotary
