// Helpers of operators that make or take rows of 8-bit codes: names, checks, allocation, and the
// formula in ATen calls. The definition: fusedops/references/quantized_rows.py.
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

// Codes in float32 and their rows' scales, of rows in float32. A row that is not finite has NaN.
QuantizedRows rounded_to_codes(const Tensor& rows, RowFormat format);

// The same as codes of the format. A row that is not finite has codes of 0 and a scale of NaN.
QuantizedRows quantized_rows(const Tensor& rows, RowFormat format);

}  // namespace fusedops
