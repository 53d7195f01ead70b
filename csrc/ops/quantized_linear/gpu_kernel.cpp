// Chooses quantized_linear's GPU kernel by the number of rows, the formats and `compute`.
//
// The limits are reasoned, not measured: nothing here has run on a GPU. Each must be measured, for
// every format, as the number of rows from which the next kernel is faster, at n and k of 4096 and
// more. `python -m benchmarks quantized_linear` has rows on both sides of each.

#include "csrc/ops/quantized_linear/gpu_kernel.h"

#include <algorithm>

namespace fusedops::quantized_linear {
namespace {

// Beyond kGemvRows, float32 multiplications take longer than loading the codes: gemv against split
// at 1, 2, 4 and 8 rows. On tensor cores, kTensorRows is what a warp's registers hold; instructions
// take longer than loading int4 codes from about 8 rows on: gemv against split at 8 and 16 rows.

// Beyond kSplitRows, tiles of the weight's rows alone fill a GPU: split against tiles at 32, 64 and
// 128 rows.
constexpr int64_t kSplitRows = 64;
// Beyond kTileRows, codes are decoded so often that decoding once is cheaper, at a write and a read
// of 2 bytes per element: tiles against scratch at 512, 1024, 2048 and 4096 rows.
constexpr int64_t kTileRows = 1024;

}  // namespace

GpuKernel gpu_kernel(int64_t rows, InputFormat input_format, Compute compute, int64_t few) {
  if (rows <= few) return GpuKernel::gemv;
  if (rows <= kSplitRows) return GpuKernel::split;
  // Scratch is bfloat16, which "exact" does not allow; products of two codes need no scratch.
  const bool tiles = rows <= kTileRows || !may_round(compute) || input_format != InputFormat::none;
  return tiles ? GpuKernel::tiles : GpuKernel::scratch;
}

int64_t few_rows(const QuantizedLayout& w, InputFormat input_format, Compute compute, bool narrow) {
  if (!narrow || input_format != InputFormat::none) return kGemvRows;
  // Tensor cores round decoded codes to x's dtype.
  if (!format_of(w.format).exact_in_16_bits && !may_round(compute)) return kGemvRows;
  const int tensor = tensor_rows(w.format, w.n.expect_int(), w.k.expect_int(), w.group_size);
  return std::max(kGemvRows, tensor);
}

int64_t quantized_linear_few_rows(const std::string& format, int64_t n, int64_t k,
                                  int64_t group_size, std::string_view input_format,
                                  std::string_view compute, bool narrow) {
  const auto kind = from_name<WeightFormat>(kQuantizedLinear, format);
  return few_rows({kind, n, k, group_size}, from_name<InputFormat>(kQuantizedLinear, input_format),
                  from_name<Compute>(kQuantizedLinear, compute), narrow);
}

std::string quantized_linear_gpu_kernel(int64_t rows, std::string_view input_format,
                                        std::string_view compute) {
  return std::string(
      to_name(gpu_kernel(rows, from_name<InputFormat>(kQuantizedLinear, input_format),
                         from_name<Compute>(kQuantizedLinear, compute))));
}

std::string quantized_linear_gpu_plan(std::string_view format, int64_t n, int64_t k,
                                      int64_t group_size, int64_t rows, std::string_view input_name,
                                      std::string_view compute_name, int64_t few) {
  const auto kind = from_name<WeightFormat>(kQuantizedLinear, format);
  const auto input_format = from_name<InputFormat>(kQuantizedLinear, input_name);
  const auto compute = from_name<Compute>(kQuantizedLinear, compute_name);
  const auto kernel = gpu_kernel(rows, input_format, compute, few);
  if (kernel == GpuKernel::gemv) {
    const std::string operands = few > kGemvRows ? "operands of tensor cores" : "float32";
    return "a CUDA C++ kernel, whose codes become " + operands + " in registers, of at most " +
           std::to_string(few) + " rows of input";
  }
  if (kernel == GpuKernel::scratch) {
    return "the weight becomes bfloat16 in memory for each call, " +
           std::to_string(n * k * 2 >> 20) + " MiB, and torch multiplies it, from " +
           std::to_string(kTileRows + 1) + " rows of input on";
  }
  const bool same_codes = input_format == format_of(kind).row_format;
  const bool integers =
      same_codes && input_format == InputFormat::int8 && group_size >= k && k <= kMostIntegers;
  const bool e4m3 = same_codes && input_format == InputFormat::fp8 && compute != Compute::exact;
  const bool wide = compute == Compute::exact || compute == Compute::int8;
  const std::string operand = integers ? "int8"
                              : e4m3   ? "float8_e4m3fn (before sm_89 bfloat16)"
                              : wide   ? "float32"
                                       : "bfloat16";
  const std::string tiles = "a Triton kernel, whose tiles multiply " + operand;
  if (kernel == GpuKernel::split) {
    return tiles + " and share their depth where there are few, of at most " +
           std::to_string(kSplitRows) + " rows of input";
  }
  return tiles + ", from " + std::to_string(kSplitRows + 1) + " rows of input on";
}

}  // namespace fusedops::quantized_linear
