// The properties of quantized_linear's weight formats, for code that chooses or checks and does not
// decode. Python's copy: FORMATS in fusedops/references/quantized_linear.py. Plain C++.
//
// CUDA kernels do not include this file, so that a new row does not ask nvcc to compile and check
// them again.
#pragma once

#include "csrc/kernels/quantized_linear.h"

namespace fusedops::quantized_linear {

struct Format {
  int bits;                  // of a code
  RowFormat row_format;      // of rows of x whose codes have the weight's type; none: no such rows
  int64_t group_size;        // the only one; 0: any
  bool flat;                 // groups cover the flattened weight, not each row
  bool has_zeros;            // w = (q - zero) scale
  bool integers;             // q is an integer: products of two codes are exact in integers
  bool exact_in_16_bits;     // q - zero is exact in bfloat16 and float16
  int64_t matrix_unit_rows;  // the fewest rows of x for a CPU's matrix unit (kernel_choice.h)
};

constexpr Format format_of(WeightFormat format) {
  constexpr Format kFormats[] = {
      {8, RowFormat::int8, 0, false, false, true, true, 3},           // int8
      {4, RowFormat::none, 0, false, true, true, true, 3},            // int4
      {4, RowFormat::none, kNf4Block, true, false, false, false, 3},  // nf4
      {8, RowFormat::fp8, 0, false, false, false, true, 4},           // fp8
  };
  return kFormats[static_cast<int>(format)];
}

}  // namespace fusedops::quantized_linear
