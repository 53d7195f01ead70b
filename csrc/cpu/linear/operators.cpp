// linear on CPUs, forward and backward, with the product of few.cpp, product.cpp or torch. With the
// first two, the bias and the activation follow while a block is in the cache.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/cpu/activation.h"
#include "csrc/cpu/grain.h"
#include "csrc/cpu/linear/few.h"
#include "csrc/cpu/linear/product.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::linear {
namespace {

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
  if (few || own_product_pays(x, weight.t())) {
    const auto outputs = linear_outputs(a);
    const auto& [y, z] = outputs;
    const auto shift = is_defined(bias) ? bias->contiguous() : Tensor();
    const Output out{y.mutable_data_ptr(), mutable_data_or_null(z),
                     data_or_null(shift),  y.size(-1),
                     dtype_of(y),          activation};
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
