// The properties of quantized_linear's weight formats, for code that chooses or checks and does not
// decode. Python's copy: FORMATS in fusedops/references/quantized_linear.py. Plain C++.
//
// CUDA kernels do not include this file, so that a new row does not ask nvcc to compile and check
// them again.
#pragma once

#include "csrc/kernels/quantized_linear.h"

namespace fusedops::quantized_linear {

struct Format {
  int bits;                                // of a code
  RowFormat row_format = RowFormat::none;  // of rows of x that have such codes too
  int64_t group_size = 0;                  // the only one; 0: any
  bool flat = false;                       // groups cover the flattened weight, not each row
  bool has_zeros = false;                  // w = (q - zero) scale
  bool integers = false;                   // q is an integer
  bool exact_in_16_bits = false;           // q - zero is exact in bfloat16 and float16
  int64_t matrix_unit_rows = 3;            // the fewest rows of x for a CPU's matrix unit
};

constexpr Format format_of(WeightFormat format) {
  constexpr Format kFormats[] = {
      // int8, int4, nf4, fp8
      {.bits = 8, .row_format = RowFormat::int8, .integers = true, .exact_in_16_bits = true},
      {.bits = 4, .has_zeros = true, .integers = true, .exact_in_16_bits = true},
      {.bits = 4, .group_size = kNf4Block, .flat = true},
      {.bits = 8, .row_format = RowFormat::fp8, .exact_in_16_bits = true, .matrix_unit_rows = 4},
  };
  return kFormats[static_cast<int>(format)];
}

}  // namespace fusedops::quantized_linear
