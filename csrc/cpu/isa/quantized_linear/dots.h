// Dot products of rows, and the outputs made from their sums.
#pragma once

#include "csrc/cpu/isa/quantized_linear/codes.h"

namespace fusedops::cpu::quantized_linear {

constexpr int64_t kLanes = 64;  // bytes per step along a row; rows are zero-padded to a multiple

// out [rows, columns] = x w^T, or += if `add`: dot products of rows x [rows, k] and w [columns, k].
// out is float32, or int32 for integers. The order of a sum does not depend on the number of rows.
// columns: columns_for(rows). Widths are in elements; k is a multiple of kLanes bytes.
struct Dots {
  const void *x, *w;
  int64_t ld_x, ld_w, rows, k;
  void* out;
  int64_t ld_out;
  bool add;
  Operand operand;
};
FUSEDOPS_ISA_FUNCTION(dot_rows, const Dots& args)

// Returns how many rows of w are multiplied together: more if x has few rows.
constexpr int64_t columns_for(int64_t rows) { return rows <= 2 ? 8 : 4; }

// Computes a row y = rounded(sums factor scales + bias). For integers, sums - 128 sum replaces
// sums, because w holds codes + 128.
struct FinishRow {
  const void* sums;
  int64_t n;
  float factor;         // the row's scale
  const float* scales;  // per column, or null
  int32_t sum;          // the sum of the row's codes
  const void* bias;     // in y's dtype, or null
  void* y;
  Dtype dtype;
  Operand operand;
};
FUSEDOPS_ISA_FUNCTION(finish_sums, const FinishRow& args)

}  // namespace fusedops::cpu::quantized_linear
