// Matrix products in float32, cut into blocks that fit the caches, and the choice between them and
// torch's.
#pragma once

#include <c10/util/FunctionRef.h>

#include "csrc/cpu/isa/linear/product.h"
#include "csrc/cpu/linear/output.h"

namespace fusedops::cpu::linear {

constexpr int64_t kDeepest = 192;
constexpr int64_t kPacking = 28;  // multiply-adds in the time of packing a number

// c [rows, columns] = a b.
//
// pack(first, deep, begin, end, packed) packs columns [begin, end) of rows [first, first + deep) of
// b, as pack_columns does; begin is a multiple of kPanel, and packed is where column 0 would be.
// done(c, stride, row, last, column, width) gets each finished block: c is its first number.
struct Product {
  Matrix a;
  int64_t rows, columns, depth;  // none is 0
  int64_t deepest;               // rows of b in a block, at most kDeepest - even + 1
  int64_t even;                  // the first row of every block is a multiple of it
  int64_t packing;               // multiply-adds in the time of packing a number of b
  c10::function_ref<void(int64_t, int64_t, int64_t, int64_t, float*)> pack;
  c10::function_ref<void(const float*, int64_t, int64_t, int64_t, int64_t, int64_t)> done;
};

// c: where to compute, [rows, columns]; if null, in scratch memory. Bits do not depend on the
// number of threads.
void multiply_in_blocks(const Product& product, float* c);

// Whether `multiply` is faster than torch's product a b.
bool own_product_pays(const Tensor& a, const Tensor& b);

// The product a b in blocks, with what follows it. No size is 0.
void multiply(const Tensor& a, const Tensor& b, const Output& out);

// c = a b, by `multiply` or torch. c is contiguous.
void product(const Tensor& a, const Tensor& b, Tensor c);

}  // namespace fusedops::cpu::linear
