// Describes in words which kernel runs on this CPU.

#include "csrc/cpu/quantized_linear/plan.h"

#include <algorithm>

#include "csrc/cpu/quantized_linear/kernel_choice.h"

namespace fusedops::cpu::quantized_linear {

std::string quantized_linear_plan(std::string_view format, int64_t n, int64_t k, int64_t group_size,
                                  int64_t rows, std::string_view input_format,
                                  std::string_view compute) {
  if (isa() == Isa::none) return "";
  constexpr const char* op = kQuantizedLinear;
  const Codes w{nullptr, nullptr, nullptr, from_name<WeightFormat>(op, format), n, k, group_size};
  const Plan plan(w, rows, from_name<InputFormat>(op, input_format),
                  from_name<Compute>(op, compute));
  const std::string operand = plan.operand == Operand::integer    ? "int8"
                              : plan.operand == Operand::bfloat16 ? "bfloat16"
                                                                  : "float32";
  switch (plan.way) {
    case Way::registers:
      return "codes become " + operand + " in registers, of at most " +
             std::to_string(std::min(kFewRows, plan.unit_rows(w) - 1)) + " rows of input";
    case Way::as_they_lie: return "codes of int8 are multiplied as they lie";
    case Way::rows: return "codes become " + operand + " in a cache, a few rows at a time";
    case Way::matrix_unit: return "codes become " + operand + " in tiles of the matrix unit";
    default:
      return "codes become " + operand + " in tiles that oneDNN multiplies, from " +
             std::to_string(Plan::kMany + 1) + " rows of input on";
  }
}

}  // namespace fusedops::cpu::quantized_linear
