// Declares the functions that choose quantized_linear's GPU kernel and describe it in words.
#pragma once

#include <string>
#include <string_view>

#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::quantized_linear {

//   gemv     csrc/cuda: codes are decoded in registers, to float32, or for float16 and bfloat16 to
//            the tensor cores' operands
//   split    fusedops/triton: tiles of a few rows; several programs share the depth
//   tiles    fusedops/triton: tiles of many rows
//   scratch  the weight is dequantized to bfloat16 for one call, and torch multiplies it
enum class GpuKernel : uint8_t { gemv, split, tiles, scratch };
constexpr Names<4> names_of(GpuKernel) { return {"kernel", {"gemv", "split", "tiles", "scratch"}}; }

// few: the most rows of x that csrc/cuda multiplies, which few_rows returns. narrow: whether x is
// float16 or bfloat16, with contiguous rows at multiples of 16 bytes.
GpuKernel gpu_kernel(int64_t rows, InputFormat input_format, Compute compute,
                     int64_t few = kGemvRows);
int64_t few_rows(const QuantizedLayout& weight, InputFormat input_format, Compute compute,
                 bool narrow);
int64_t quantized_linear_few_rows(const std::string& format, int64_t n, int64_t k,
                                  int64_t group_size, std::string_view input_format,
                                  std::string_view compute, bool narrow);
std::string quantized_linear_gpu_kernel(int64_t rows, std::string_view input_format,
                                        std::string_view compute);
std::string quantized_linear_gpu_plan(std::string_view format, int64_t n, int64_t k,
                                      int64_t group_size, int64_t rows,
                                      std::string_view input_format, std::string_view compute,
                                      int64_t few);

}  // namespace fusedops::quantized_linear
