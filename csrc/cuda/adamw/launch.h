// AdamW on GPUs: the launchers of step.cu and gradients.cu.
#pragma once

#include "csrc/kernels/adamw.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda::adamw {

using namespace fusedops::adamw;

// Parameter groups per launch. They are kernel arguments, because learning rates change every step.
constexpr int kGroups = 32;

// The table of tensors on the device, and the total number of blocks.
struct AdamWRows {
  const AdamWTensor* tensors;
  int count;
  int64_t blocks;
};

struct AdamWLaunch : AdamWRows {
  AdamWGroup groups[kGroups];
  int first_group;  // the index of groups[0]; tensors of other groups are skipped
  uint64_t seed;
  const double* squares;  // [kSquareParts] or null
  double max_grad_norm;
  const float *grad_scale, *found_inf;  // or null
  unsigned* finished;                   // starts at 0; counts finished blocks of threads
};

void launch_adamw_step(const AdamWLaunch& args, CUstream_st* stream);

// squares [kSquareParts]
void launch_adamw_squares(const AdamWRows& rows, double* squares, CUstream_st* stream);

void launch_adamw_scale(const AdamWRows& rows, const double* squares, double max_norm,
                        CUstream_st* stream);

}  // namespace fusedops::cuda::adamw
