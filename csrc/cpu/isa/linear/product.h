// Matrix products in float32, of float32, bfloat16 or float16 operands that are packed for them.
// csrc/cpu/linear/product.h cuts them into blocks.
#pragma once

#include "csrc/cpu/isa.h"

namespace fusedops::cpu::linear {

struct Matrix {
  const void* data;
  int64_t row_stride, column_stride;  // one of them is 1
  Dtype dtype;
};

// c += a b, or c = a b, for one block of columns and of depth.
struct ProductBlock {
  Matrix a;        // [rows, depth]
  const float* b;  // [depth, columns], packed by pack_columns
  float* c;        // [rows, columns]
  int64_t c_stride, columns, depth;
  bool add;
};

constexpr int64_t kPanel = 32;  // columns per panel of pack_columns
constexpr int64_t kStrip = 16;  // maximum rows per panel

// Packs columns [begin, end) of b [depth, columns], begin a multiple of kPanel. May write up to one
// vector past the end.
FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(pack_columns, const Matrix& b, int64_t depth, int64_t begin,
                                   int64_t end, float* packed)

// Multiplies rows [begin, end). packed: scratch for end - begin + kStrip rows of a, plus kPanel
// elements.
FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(product_rows, const ProductBlock& block, int64_t begin,
                                   int64_t end, float* packed)

}  // namespace fusedops::cpu::linear
