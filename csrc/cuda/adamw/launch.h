// Launchers and kernel arguments for AdamW on GPUs.
#pragma once

#include "csrc/kernels/adamw.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda::adamw {

using namespace fusedops::adamw;

// The groups that one launch knows. They go with the launch, as learning rates change at each step.
constexpr int kGroups = 32;

// Tensors on the device, and the number of all their blocks.
struct AdamWRows {
  const AdamWTensor* tensors;
  int count;
  int64_t blocks;
};

struct AdamWLaunch : AdamWRows {
  AdamWGroup groups[kGroups];
  int first_group;  // the number of groups[0]; tensors of groups that are not here are left alone
  uint64_t seed;
  const double* squares;  // kSquareParts; or null
  double max_grad_norm;
  const float *grad_scale, *found_inf;  // or null
  unsigned* finished;                   // 0; how many blocks of threads are done
};

void launch_adamw_step(const AdamWLaunch& args, CUstream_st* stream);

// squares [kSquareParts]
void launch_adamw_squares(const AdamWRows& rows, double* squares, CUstream_st* stream);

void launch_adamw_scale(const AdamWRows& rows, const double* squares, double max_norm,
                        CUstream_st* stream);

}  // namespace fusedops::cuda::adamw
