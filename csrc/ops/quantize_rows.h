// Helpers of operators that make or take rows of 8-bit codes: names, checks and
// allocation. The definition: fusedops/references/quantized_rows.py.
#pragma once

#include <string_view>
#include <tuple>
#include <vector>

#include "csrc/common.h"
#include "csrc/kernels/quantized_rows.h"
#include "csrc/ops/operator.h"

namespace fusedops {

constexpr Names<3> names_of(RowFormat) { return {"input_format", {"none", "int8", "fp8"}, true}; }

constexpr c10::ScalarType code_dtype(RowFormat format) {
  return format == RowFormat::fp8 ? at::kFloat8_e4m3fn : at::kChar;
}

// Checks the argument output_format of an operator that quantizes its result.
RowFormat output_format(const char* op, std::string_view name);

// Raises if a gradient of the quantized result is wanted: there is none.
void check_no_gradient(const char* op, RowFormat format, Arguments inputs);

// codes [shape], scale float32 [shape but the last, 1]
using QuantizedRows = std::tuple<Tensor, Tensor>;
QuantizedRows quantized_rows_outputs(const char* op, const Tensor& like,
                                     const std::vector<c10::SymInt>& shape, RowFormat format);

}  // namespace fusedops
