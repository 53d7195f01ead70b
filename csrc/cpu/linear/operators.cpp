// linear on CPUs, forward and backward, with the product of few.cpp, product.cpp or torch. With the
// first two, the bias and the activation follow while a block is in the cache.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/cpu/activation.h"
#include "csrc/cpu/grain.h"
#include "csrc/cpu/linear/few.h"
#include "csrc/cpu/linear/output.h"
#include "csrc/cpu/linear/product.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::linear {
namespace {

bool own_product(const Tensor& a, const Tensor& b) {
  return own_product_pays(a.scalar_type(), a.size(0), b.size(1), a.size(1), b.stride(1) != 1);
}

// t [rows, columns], copied if neither of its strides is 1.
struct Operand {
  Tensor held;
  Matrix matrix;

  explicit Operand(const Tensor& t) : held(t) {
    const bool strided = t.stride(0) == 1 || t.stride(1) == 1;
    if (!strided) held = t.contiguous();
    matrix = {held.const_data_ptr(), strided ? t.stride(0) : t.size(1), strided ? t.stride(1) : 1,
              dtype_of(t)};
  }
};

// The product a b, with what follows it. No size is 0.
void multiply(const Tensor& a, const Tensor& b, const Output& out) {
  const Operand left(a), right(b);
  const auto& second = right.matrix;
  const auto pack = [&](int64_t first, int64_t deep, int64_t begin, int64_t end, float* packed) {
    const int64_t offset = first * second.row_stride * size_of(second.dtype);
    const auto* const data = static_cast<const char*>(second.data) + offset;
    pack_columns_for_isa()({data, second.row_stride, second.column_stride, second.dtype}, deep,
                           begin, end, packed);
  };
  const auto& first = out.z.defined() ? out.z : out.y;
  const bool in_place = first.scalar_type() == at::kFloat;
  const bool plain = in_place && !out.bias.defined() && out.activation == Activation::none;
  const auto done = [&](const float* c, int64_t stride, int64_t row, int64_t last, int64_t column,
                        int64_t width) {
    if (!plain) out.write(c, stride, row, last - row, column, width);
  };
  multiply_in_blocks({left.matrix, a.size(0), b.size(1), a.size(1), kDeepest, 1, pack, done},
                     in_place ? first.mutable_data_ptr<float>() : nullptr);
}

// c = a b
void product(const Tensor& a, const Tensor& b, Tensor c) {
  if (own_product(a, b)) {
    multiply(a, b, Output{c, Tensor(), Tensor()});
  } else {
    at::mm_out(c, a, b);
  }
}

bool empty(const Tensor& x, const Tensor& weight) { return x.numel() == 0 || weight.numel() == 0; }

// The activation of torch's product.
void activated(const Tensor& product, Activation activation, const Tensor& y) {
  const int64_t n = product.size(-1), rows = product.numel() / n;
  const auto dtype = dtype_of(product);
  const ActivateRows args{product.const_data_ptr(),
                          nullptr,
                          nullptr,
                          y.mutable_data_ptr(),
                          n,
                          n,
                          n,
                          dtype,
                          dtype,
                          activation};
  auto* const run = activate_rows_for_isa();
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / n),
                   [&](int64_t begin, int64_t end) { run(args, begin, end); });
}

LinearForward linear_forward(const LinearArguments& a) {
  const auto& [input, weight, bias, activation, keep_z] = a;
  if (isa() == Isa::none || input.scalar_type() == at::kDouble || empty(input, weight)) {
    return linear_forward_reference(a);
  }
  linear_check(a);
  const auto x = as_rows(input);
  const bool few =
      few_rows_pay(x.scalar_type(), x.size(0), weight.size(0), x.size(1), weight.stride(1) != 1);
  if (few || own_product(x, weight.t())) {
    const auto outputs = linear_outputs(a);
    const auto& [y, z] = outputs;
    const Output out{as_rows(y), z.defined() ? as_rows(z) : z,
                     is_defined(bias) ? bias->contiguous() : Tensor(), activation};
    few ? few_rows(x, weight, out) : multiply(x, weight.t(), out);
    return outputs;
  }
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
    return linear_backward_reference(a);
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
