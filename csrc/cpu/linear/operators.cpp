// linear on CPUs: products in blocks that fit the caches, each followed by its activation while it
// is in the cache.
//
// The depth is cut into blocks of kDepth: the L2 cache holds kHeight packed rows of a, the L3 cache
// kWidth packed columns of b. A register sums at most kDepth terms, and the blocks' sums are added
// after that, as in MKL; one chain over the whole depth, as in oneDNN, errs two to four times as
// much. Blocks depend only on the shape and threads take whole rows, so neither the number nor the
// order of threads changes a bit.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "csrc/cpu/activation.h"
#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/linear/product.h"
#include "csrc/cpu/linear/few.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::linear {
namespace {

constexpr int64_t kDepth = 192, kHeight = 336, kWidth = 1024;

// A thread's packed operands. They are never freed: fresh pages cost more than small products.
class Packed {
 public:
  explicit Packed(int64_t elements)
      : data_(static_cast<float*>(std::aligned_alloc(64, elements * sizeof(float))), std::free) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  float* data() const { return data_.get(); }

 private:
  std::unique_ptr<float, decltype(&std::free)> data_;
};

float* packed_rows() {
  thread_local const Packed packed((kHeight + kStrip) * kDepth + kPanel);
  return packed.data();
}

float* packed_columns() {
  thread_local const Packed packed(kWidth * kDepth + kPanel);
  return packed.data();
}

// t [rows, columns], copied if neither of its strides is 1.
struct Operand {
  Tensor held;
  Matrix matrix;

  explicit Operand(const Tensor& t) : held(t) {
    const bool strided = t.stride(0) == 1 || t.stride(1) == 1;
    if (!strided) held = t.contiguous();
    matrix.data = held.const_data_ptr<float>();
    matrix.row_stride = strided ? t.stride(0) : t.size(1);
    matrix.column_stride = strided ? t.stride(1) : 1;
  }
};

Matrix shifted(const Matrix& m, int64_t row, int64_t column) {
  return {m.data + row * m.row_stride + column * m.column_stride, m.row_stride, m.column_stride};
}

// Returns how many rows a thread takes at a time: an equal share, at most kHeight.
int64_t height_for(int64_t rows) {
  const int64_t share = (rows + at::get_num_threads() - 1) / at::get_num_threads();
  return std::clamp<int64_t>(share, 1, kHeight);
}

// Packs columns [0, width) of b into panels.
void pack(const Matrix& b, int64_t depth, int64_t width, float* packed) {
  auto* const run = pack_columns_for_isa();
  const int64_t grain = kGrain / (kPanel * depth) + 1;
  at::parallel_for(0, (width + kPanel - 1) / kPanel, grain, [&](int64_t begin, int64_t end) {
    run(b, depth, begin * kPanel, std::min(end * kPanel, width), packed);
  });
}

// Multiplies one block. Calls done(row, end) after each share of the rows.
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

// c [rows, columns] = a b. Calls done(row, end, column, columns) after each block of c. No size is
// 0.
template <class Done>
void multiply(const Tensor& a, const Tensor& b, const Tensor& c, const Done& done) {
  const Operand left(a), right(b);
  const int64_t columns = b.size(1), depth = a.size(1), blocks = (depth + kDepth - 1) / kDepth;
  float* const packed = packed_columns();
  for (int64_t column = 0; column < columns; column += kWidth) {
    const int64_t width = std::min(kWidth, columns - column);
    float* const to = c.mutable_data_ptr<float>() + column;
    for (int64_t q = 0; q < blocks; ++q) {
      const int64_t first = q * depth / blocks, deep = (q + 1) * depth / blocks - first;
      pack(shifted(right.matrix, first, column), deep, width, packed);
      const ProductBlock block{
          shifted(left.matrix, 0, first), packed, to, columns, width, deep, q > 0};
      multiply_block(block, a.size(0), [&](int64_t row, int64_t last) {
        if (q == blocks - 1) done(row, last, column, width);
      });
    }
  }
}

bool own_product(const Tensor& a, const Tensor& b) {
  return own_product_pays(a.scalar_type(), a.size(0), b.size(1), a.size(1), b.stride(1) != 1);
}

// c = a b
void product(const Tensor& a, const Tensor& b, Tensor c) {
  if (own_product(a, b)) {
    multiply(a, b, c, [](auto...) {});
  } else {
    at::mm_out(c, a, b);
  }
}

bool empty(const Tensor& x, const Tensor& weight) { return x.numel() == 0 || weight.numel() == 0; }

// y = activation(x weight^T + bias). Also stores z, the value before the activation, if defined.
void fused(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, Activation activation,
           const Tensor& z, const Tensor& y) {
  const int64_t n = weight.size(0);
  const auto target = as_rows(z.defined() ? z : y);
  const auto shift = given(bias) ? bias->contiguous() : Tensor();
  const float* const bias_data = shift.defined() ? shift.const_data_ptr<float>() : nullptr;
  auto* const activate = activate_rows_for_isa();
  const bool plain = bias_data == nullptr && activation == Activation::none;
  multiply(x, weight.t(), target, [&](int64_t row, int64_t last, int64_t column, int64_t width) {
    if (plain) return;
    const auto at = [&](const Tensor& t) {
      return t.defined() ? t.mutable_data_ptr<float>() + column : nullptr;
    };
    const ActivateRows args{at(target), bias_data == nullptr ? nullptr : bias_data + column,
                            at(z),      at(y),
                            width,      n,
                            n,          Dtype::float32,
                            activation};
    activate(args, row, last);
  });
}

// The activation of torch's product.
void activated(const Tensor& product, Activation activation, const Tensor& y) {
  const int64_t n = product.size(-1), rows = product.numel() / n;
  const ActivateRows args{
      product.const_data_ptr(), nullptr,   nullptr, y.mutable_data_ptr(), n, n, n,
      dtype_of(product),        activation};
  auto* const run = activate_rows_for_isa();
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / n),
                   [&](int64_t begin, int64_t end) { run(args, begin, end); });
}

LinearForward linear_forward(const LinearArguments& a) {
  const auto& [input, weight, bias, activation, keep_z] = a;
  if (isa() == Isa::none || input.scalar_type() == at::kDouble || empty(input, weight)) {
    return linear_forward_composite(a);
  }
  const auto x = as_rows(input);
  if (few_rows_pay(x.scalar_type(), x.size(0), weight.size(0), x.size(1), weight.stride(1) != 1)) {
    auto outputs = linear_outputs(a);
    few_rows(x, weight, bias, activation, std::get<1>(outputs), std::get<0>(outputs));
    return outputs;
  }
  if (own_product(x, weight.t())) {
    auto outputs = linear_outputs(a);
    fused(x, weight, bias, activation, std::get<1>(outputs), std::get<0>(outputs));
    return outputs;
  }
  linear_check(a);
  const auto z = at::linear(input, weight, bias).contiguous();
  if (activation == Activation::none) return {z, Tensor()};
  const auto y = keep_z ? at::empty_like(z) : z;
  activated(z, activation, y);
  return {y, keep_z ? z : Tensor()};
}

LinearBackward linear_backward(const LinearBackwardArguments& a) {
  const auto& [dy, input, weight, z, activation, output_mask] = a;
  auto outputs = linear_backward_outputs(a);
  const bool nothing = dy.numel() == 0 || (output_mask[0] && weight->numel() == 0) ||
                       (output_mask[1] && input->numel() == 0);
  if (isa() == Isa::none || dy.scalar_type() == at::kDouble || nothing) {
    return linear_backward_composite(a);
  }
  auto& [dinput, dweight, dbias] = outputs;
  const auto dz = rows_of_dz(dy, z, activation);
  if (output_mask[0]) product(dz, *weight, as_rows(dinput));
  if (output_mask[1]) {
    const auto x = as_rows(*input);
    is_transposed(weight) ? product(x.t(), dz, dweight.t()) : product(dz.t(), x, dweight);
  }
  if (output_mask[2]) at::sum_out(dbias, dz, at::IntArrayRef{0});
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("linear_forward", flat<linear_forward>);
  m.impl("linear_backward", flat<linear_backward>);
}

}  // namespace fusedops::cpu::linear
