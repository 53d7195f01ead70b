// Declares the float32 matmul on CPUs. Blocks: csrc/cpu/linear.cpp.
#pragma once

#include "csrc/cpu/isa.h"

namespace fusedops::cpu::linear {

struct Matrix {
  const float* data;
  int64_t row_stride, column_stride;  // one of them is 1
};

// Rows [begin, end) of c += a b, or of c = a b, for one block of columns and of depth.
struct ProductBlock {
  Matrix a;        // [rows, depth]
  const float* b;  // [depth, columns], as pack_columns leaves it
  float* c;        // [rows, columns]
  int64_t c_stride, columns, depth;
  bool add;
};

constexpr int64_t kPanel = 32;  // pack_columns takes columns by so many
constexpr int64_t kStrip = 16;  // no panel of rows is larger

// Packs columns [begin, end) of b [depth, columns], begin a multiple of kPanel. A store may run
// over its end by a vector.
FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(pack_columns, const Matrix& b, int64_t depth, int64_t begin,
                                   int64_t end, float* packed)

// packed: room for end - begin + kStrip rows of a, kPanel beyond
FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(product_rows, const ProductBlock& block, int64_t begin,
                                   int64_t end, float* packed)

}  // namespace fusedops::cpu::linear
