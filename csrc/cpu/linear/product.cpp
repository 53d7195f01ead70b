// Matrix products in float32, cut into blocks that fit the caches. A register sums a block of the
// depth, and the blocks' sums are added after that, as in MKL; one chain over the whole depth, as
// in oneDNN, errs two to four times as much. Blocks of the depth depend only on the shape, so
// neither the number nor the order of threads changes a bit. Each thread computes a part of the
// product by itself, since waiting for others after each block costs more than packing some
// operands twice.

#include "csrc/cpu/linear/product.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

namespace fusedops::cpu::linear {
namespace {

// The L2 cache holds kHeight packed rows of a, the L3 cache kWidth packed columns of b.
constexpr int64_t kHeight = 336, kWidth = 1024;
constexpr int64_t kTall = 24 * kHeight;      // most rows whose sums are in scratch: 32 MiB
constexpr int64_t kPart = int64_t{1} << 18;  // least multiply-adds of a part

// A thread's packed operands, kept until it ends: fresh pages cost more than small products.
class PackedOperands {
 public:
  explicit PackedOperands(int64_t elements)
      : data_(static_cast<float*>(std::aligned_alloc(64, elements * sizeof(float))), std::free) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  float* data() const { return data_.get(); }

 private:
  std::unique_ptr<float, decltype(&std::free)> data_;
};

float* packed_rows() {
  thread_local const PackedOperands packed((kHeight + kStrip) * kDeepest + kPanel);
  return packed.data();
}

float* packed_columns() {
  thread_local const PackedOperands packed(kWidth * kDeepest + kPanel);
  return packed.data();
}

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kTileRows = 14;  // of AVX-512

// How a product is cut into parts of about `height` rows and `width` columns.
struct Parts {
  int64_t height, width;
};

// Cuts a product into at most one part for each thread, so that the slowest part ends early.
Parts parts_of(const Product& product) {
  const int64_t rows = product.rows, columns = product.columns;
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t most = std::clamp<int64_t>(rows * columns * product.depth / kPart, 1, threads);
  Parts best{rows, columns};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t across = 1; across <= most; ++across) {
    const int64_t height = divided_up(divided_up(rows, most / across), kTileRows) * kTileRows;
    const int64_t width = divided_up(divided_up(columns, across), kPanel) * kPanel;
    const int64_t time =
        height * width + product.packing * width + kPacking * height * divided_up(width, kWidth);
    if (time < least) least = time, best = {height, width};
  }
  return best;
}

// t [rows, columns], copied if neither of its strides is 1.
struct Operand {
  Tensor held;
  Matrix matrix;

  explicit Operand(const Tensor& t) : held(t) {
    if (t.stride(0) != 1 && t.stride(1) != 1) held = t.contiguous();
    matrix = {held.const_data_ptr(), held.stride(0), held.stride(1), dtype_of(t)};
  }
};

Matrix from(const Matrix& m, int64_t row, int64_t column) {
  const int64_t offset = (row * m.row_stride + column * m.column_stride) * size_of(m.dtype);
  return {static_cast<const char*>(m.data) + offset, m.row_stride, m.column_stride, m.dtype};
}

struct Range {
  int64_t begin, end;
};

// Multiplies one part in blocks. If c is null, the sums of at most `tall` rows are in scratch.
void multiply_part(const Product& product, Range rows, Range columns, float* c, int64_t tall) {
  const int64_t depth = product.depth, blocks = divided_up(depth, product.deepest);
  const auto begin_of = [&](int64_t block) {
    return block == blocks ? depth : block * depth / blocks / product.even * product.even;
  };
  const int64_t widest = std::min(kWidth, columns.end - columns.begin);
  const int64_t stride = c == nullptr ? widest : product.columns;
  tall = c == nullptr ? std::min(tall, rows.end - rows.begin) : rows.end - rows.begin;
  const std::unique_ptr<float[]> sums(c == nullptr ? new float[tall * stride] : nullptr);
  float *const packed = packed_columns(), *const packed_a = packed_rows();
  auto* const run = product_rows_for_isa();
  for (int64_t column = columns.begin; column < columns.end; column += kWidth) {
    const int64_t width = std::min(kWidth, columns.end - column);
    for (int64_t top = rows.begin; top < rows.end; top += tall) {
      const int64_t live = std::min(tall, rows.end - top);
      float* const to = c == nullptr ? sums.get() : c + top * stride + column;
      for (int64_t q = 0; q < blocks; ++q) {
        const int64_t first = begin_of(q), deep = begin_of(q + 1) - first;
        product.pack(first, deep, column, column + width, packed - column * deep);
        const ProductBlock block{
            from(product.a, top, first), packed, to, stride, width, deep, q > 0};
        for (int64_t row = 0; row < live; row += kHeight) {
          const int64_t last = std::min(row + kHeight, live);
          run(block, row, last, packed_a);
          if (q == blocks - 1) {
            product.done(to + row * stride, stride, top + row, top + last, column, width);
          }
        }
      }
    }
  }
}

}  // namespace

void multiply_in_blocks(const Product& product, float* c) {
  const Parts parts = parts_of(product);
  const int64_t across = divided_up(product.columns, parts.width);
  const int64_t number = divided_up(product.rows, parts.height) * across;
  at::parallel_for(0, number, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t row = part / across * parts.height, column = part % across * parts.width;
      multiply_part(product, {row, std::min(row + parts.height, product.rows)},
                    {column, std::min(column + parts.width, product.columns)}, c,
                    std::max(kTall / number, kHeight));
    }
  });
}

bool own_product_pays(const Tensor& a, const Tensor& b) {
  return fusedops::linear::own_product_pays(a.scalar_type(), a.size(0), b.size(1), a.size(1),
                                            b.stride(1) != 1);
}

void multiply(const Tensor& a, const Tensor& b, const Output& out) {
  const Operand left(a), right(b);
  const auto pack = [&](int64_t first, int64_t deep, int64_t begin, int64_t end, float* packed) {
    pack_columns_for_isa()(from(right.matrix, first, 0), deep, begin, end, packed);
  };
  const bool in_place = out.dtype == Dtype::float32;
  const bool plain = in_place && out.bias == nullptr && out.activation == Activation::none;
  const auto done = [&](const float* c, int64_t stride, int64_t row, int64_t last, int64_t column,
                        int64_t width) {
    if (!plain) out.write(c, stride, row, last - row, column, width);
  };
  auto* const first = static_cast<float*>(out.z != nullptr ? out.z : out.y);
  multiply_in_blocks({left.matrix, a.size(0), b.size(1), a.size(1), kDeepest, 1, kPacking, pack,
                      done},
                     in_place ? first : nullptr);
}

void product(const Tensor& a, const Tensor& b, Tensor c) {
  if (own_product_pays(a, b)) {
    multiply(a, b, {c.mutable_data_ptr(), nullptr, nullptr, c.size(1), dtype_of(c)});
  } else {
    at::mm_out(c, a, b);
  }
}

}  // namespace fusedops::cpu::linear
