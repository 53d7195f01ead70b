// quantized_linear's row dot products on CPUs, and how their sums are finished.
#pragma once

#include "csrc/cpu/isa/quantized_linear/codes.h"

namespace fusedops::cpu::quantized_linear {

constexpr int64_t kLanes = 64;  // bytes of a step along the rows: they are padded with zeros to it

// out [rows, columns] = x w^T, or += where `add`: dot products of rows x [rows, k] and w [columns,
// k]. out is float32, or int32 of integers. A sum is in one order, whatever the number of rows.
// columns: those of columns_for(rows). Widths are in elements, k a multiple of kLanes bytes.
struct Dots {
  const void *x, *w;
  int64_t ld_x, ld_w, rows, k;
  void* out;
  int64_t ld_out;
  bool add;
  Operand operand;
};
FUSEDOPS_ISA_FUNCTION(dot_rows, const Dots& args)

// How many rows of w go together: more of them where x has few.
constexpr int64_t columns_for(int64_t rows) { return rows <= 2 ? 8 : 4; }

// A row of y = rounded(sums factor scales + bias). Of integers it is (sums
// - 128 sum) that is scaled: w is 128 above its codes.
struct FinishRow {
  const void* sums;
  int64_t n;
  float factor;         // of the row
  const float* scales;  // of the columns, or null
  int32_t sum;          // of the row's codes
  const void* bias;     // as y, or null
  void* y;
  Dtype dtype;
  Operand operand;
};
FUSEDOPS_ISA_FUNCTION(finish_sums, const FinishRow& args)

}  // namespace fusedops::cpu::quantized_linear
