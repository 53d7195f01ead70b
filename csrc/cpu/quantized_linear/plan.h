// Describes in words which kernel of quantized_linear runs on this CPU.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fusedops::cpu::quantized_linear {

// How `rows` rows are multiplied by a weight [n, k]. Empty if by ATen calls.
std::string quantized_linear_plan(std::string_view format, int64_t n, int64_t k, int64_t group_size,
                                  int64_t rows, std::string_view input_format,
                                  std::string_view compute);

}  // namespace fusedops::cpu::quantized_linear
