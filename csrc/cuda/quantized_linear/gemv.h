// Launcher and kernel arguments for quantized_linear of few rows on GPUs.
#pragma once

#include <cstdint>

#include "csrc/kernels/linear.h"
#include "csrc/kernels/quantized_linear.h"

struct CUstream_st;  // *cudaStream_t, without CUDA's headers

namespace fusedops::cuda::quantized_linear {

using namespace fusedops::quantized_linear;
using fusedops::linear::Activation;

struct GemvArgs {
  const void* x;  // [rows, k], the rows x_stride elements apart
  int64_t x_stride;
  Dtype x_dtype;
  int rows;            // kGemvRows at most
  const float* steps;  // [rows], of an x of codes; or null
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;  // of int4
  WeightFormat format;
  int64_t n, k, group_size, groups;
  float nf4[16];
  const void* bias;  // [n] or null
  void *y, *z;       // [rows, n]; z or null
  Dtype dtype;       // of bias, y and z
  Activation activation;
  int parts;        // among how many blocks a row's depth is split
  float* partials;  // [parts, rows, n] where they are several
};

// In how many parts launch_gemv would split the depth.
int gemv_parts(const GemvArgs& args);

void launch_gemv(const GemvArgs& args, CUstream_st* stream);

// Rows of x as codes, in float32 [rows, k], and their steps, by which a row's largest number has
// the largest code.
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
