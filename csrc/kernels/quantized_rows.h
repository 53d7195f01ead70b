// Rows of 8-bit codes, with a scale for each row: formats and constants, for the kernels of any
// device. The definition: fusedops/references/quantized_rows.py. Plain C++.
#pragma once

#include <cstdint>

namespace fusedops {

// The format to which rows are quantized, each scaled by its largest number. none: not at all.
enum class RowFormat : uint8_t { none, int8, fp8 };

constexpr float kLargestInt8 = 127;  // codes are symmetric: -128 is not used
constexpr float kLargestE4m3 = 448;
constexpr float kSmallestScale = 1e-38f;  // smaller scales give codes of 0; its inverse is finite

constexpr float largest_code(RowFormat format) {
  return format == RowFormat::fp8 ? kLargestE4m3 : kLargestInt8;
}

}  // namespace fusedops
