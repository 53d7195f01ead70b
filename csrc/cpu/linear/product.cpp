// Matrix products in float32, cut into blocks that fit the caches. A register sums a block of the
// depth, and the blocks' sums are added after that, as in MKL; one chain over the whole depth, as
// in oneDNN, errs two to four times as much. Blocks depend only on the shape and threads take whole
// rows, so neither the number nor the order of threads changes a bit.

#include "csrc/cpu/linear/product.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "csrc/cpu/grain.h"

namespace fusedops::cpu::linear {
namespace {

// The L2 cache holds kHeight packed rows of a, the L3 cache kWidth packed columns of b.
constexpr int64_t kHeight = 336, kWidth = 1024;
constexpr int64_t kTall = 24 * kHeight;  // most rows whose sums are in scratch: 32 MiB

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

// Returns how many rows a thread takes at a time: an equal share, at most kHeight.
int64_t height_for(int64_t rows) {
  const int64_t share = (rows + at::get_num_threads() - 1) / at::get_num_threads();
  return std::clamp<int64_t>(share, 1, kHeight);
}

// Packs `deep` rows of b from `first` on, and its columns [column, column + width), into panels.
void pack_block(const Product& product, int64_t first, int64_t deep, int64_t column, int64_t width,
                float* packed) {
  const int64_t grain = kGrain / (kPanel * deep) + 1;
  at::parallel_for(0, (width + kPanel - 1) / kPanel, grain, [&](int64_t begin, int64_t end) {
    product.pack(first, deep, column + begin * kPanel, column + std::min(end * kPanel, width),
                 packed - column * deep);
  });
}

// Multiplies one block. Calls done(row, last) after each share of the rows.
template <class Done>
void multiply_block(const ProductBlock& block, int64_t rows, const Done& done) {
  auto* const run = product_rows_for_isa();
  const int64_t height = height_for(rows);
  at::parallel_for(0, (rows + height - 1) / height, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * height; row < std::min(end * height, rows); row += height) {
      const int64_t last = std::min(row + height, rows);
      run(block, row, last, packed_rows());
      done(row, last);
    }
  });
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

}  // namespace

void multiply_in_blocks(const Product& product, float* c) {
  const int64_t depth = product.depth;
  const int64_t blocks = (depth + product.deepest - 1) / product.deepest;
  const int64_t stride = c == nullptr ? std::min(kWidth, product.columns) : product.columns;
  const int64_t tall = c == nullptr ? std::min(kTall, product.rows) : product.rows;
  const std::unique_ptr<float[]> scratch(c == nullptr ? new float[tall * stride] : nullptr);
  const auto begin_of = [&](int64_t block) {
    return block == blocks ? depth : block * depth / blocks / product.even * product.even;
  };
  float* const packed = packed_columns();
  for (int64_t column = 0; column < product.columns; column += kWidth) {
    const int64_t width = std::min(kWidth, product.columns - column);
    float* const to = c == nullptr ? scratch.get() : c + column;
    for (int64_t top = 0; top < product.rows; top += tall) {
      const int64_t rows = std::min(tall, product.rows - top);
      for (int64_t q = 0; q < blocks; ++q) {
        const int64_t first = begin_of(q), deep = begin_of(q + 1) - first;
        pack_block(product, first, deep, column, width, packed);
        const ProductBlock block{
            from(product.a, top, first), packed, to, stride, width, deep, q > 0};
        multiply_block(block, rows, [&](int64_t row, int64_t last) {
          if (q < blocks - 1) return;
          product.done(to + row * stride, stride, top + row, top + last, column, width);
        });
      }
    }
  }
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
  multiply_in_blocks({left.matrix, a.size(0), b.size(1), a.size(1), kDeepest, 1, pack, done},
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
