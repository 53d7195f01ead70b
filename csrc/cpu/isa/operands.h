// Reads, pairs and transposes the operands of matrix products, and adds, scales and writes results.
#pragma once

#include "csrc/cpu/isa.h"

namespace fusedops::cpu {

constexpr int64_t kEdge = 16;  // tile sizes are padded to a multiple of this

// Rows of a dtype, each contiguous.
struct RowsOf {
  const void* data;
  int64_t stride;
  Dtype dtype;
};

// out [n, ld] = rows, padded with zeros up to `padded` rows and ld columns.
FUSEDOPS_ISA_FUNCTION(read_rows, const RowsOf& rows, int64_t n, int64_t width, int64_t padded,
                      float* out, int64_t ld)

// out = factor x, rounded to out's dtype
FUSEDOPS_ISA_FUNCTION(write_row, const float* x, int64_t width, float factor, void* out,
                      Dtype dtype)

FUSEDOPS_ISA_FUNCTION(scale_row, float* x, int64_t width, float factor)

// out [columns, ld_out] = x [rows, ld] transposed; both are multiples of kEdge.
FUSEDOPS_ISA_FUNCTION(transpose, const float* x, int64_t ld, int64_t rows, int64_t columns,
                      float* out, int64_t ld_out)

// Pairs up rows [n, columns] of 16-bit numbers: out [padded / 2, columns, 2], padded with zeros.
FUSEDOPS_ISA_FUNCTION(pair_rows, const uint16_t* x, int64_t ld, int64_t n, int64_t padded,
                      int64_t columns, uint16_t* out)

}  // namespace fusedops::cpu
