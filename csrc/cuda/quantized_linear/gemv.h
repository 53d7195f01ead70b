// quantized_linear of a few rows on GPUs: the launchers of gemv.cu, mma.cu and quantize.cu.
#pragma once

#include <cstdint>

#include "csrc/kernels/linear.h"
#include "csrc/kernels/quantized_linear.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda::quantized_linear {

using namespace fusedops::quantized_linear;
using fusedops::linear::Activation;

struct GemvArgs {
  const void* x;  // [rows, k], row stride x_stride
  int64_t x_stride;
  Dtype x_dtype;
  int rows;            // at most kGemvRows, or kTensorRows
  const float* steps;  // [rows]: the scales of a quantized x; or null
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;  // for int4
  WeightFormat format;
  int64_t n, k, group_size, groups;
  float nf4[16];
  const void* bias;  // [n] or null
  void *y, *z;       // [rows, n]; z or null
  Dtype dtype;       // bias, y and z
  Activation activation;
  bool exact;  // the weight's numbers may not be rounded
  bool tensor_cores;
  int depth_warps;  // on tensor cores, number of a block's warps that share a row's depth
  int parts;        // number of blocks that share a row's depth
  float* partials;  // [parts, rows, n] if parts > 1
};

// Chooses the kernel, and into how many parts launch_gemv splits the depth.
void plan_gemv(GemvArgs& args);

// mma.cu: whether it has a kernel; how that splits the depth; its launch, without the join.
bool on_tensor_cores(const GemvArgs& args);
void split_on_tensor_cores(GemvArgs& args);
void launch_on_tensor_cores(const GemvArgs& args, CUstream_st* stream);

void launch_gemv(const GemvArgs& args, CUstream_st* stream);

// Quantizes rows of x to codes, stored as float32 [rows, k], and their steps: a row's largest
// number gets the largest code.
struct QuantizeRows {
  const void* x;
  int64_t x_stride;
  Dtype x_dtype;
  int64_t rows, k;
  InputFormat format;  // not none
  float *codes, *steps;
};

void launch_quantize_rows(const QuantizeRows& args, CUstream_st* stream);

}  // namespace fusedops::cuda::quantized_linear
