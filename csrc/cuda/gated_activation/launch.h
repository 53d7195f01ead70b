// Gated activations on GPUs: the launchers of kernels.cu.
#pragma once

#include "csrc/kernels/gated_activation.h"
#include "csrc/kernels/quantized_rows.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda::gated_activation {

using namespace fusedops::gated_activation;

void launch_gated_forward(const GatedForward& args, CUstream_st* stream);

// A swiglu whose y is codes [rows, n]; scale: [rows].
void launch_swiglu_codes(const GatedForward& args, RowFormat format, float* scale,
                         CUstream_st* stream);

void launch_gated_backward(const GatedBackward& args, CUstream_st* stream);

}  // namespace fusedops::cuda::gated_activation
