// linear in ATen calls: what runs where no kernel does, and the double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "csrc/ops/linear/operators.h"

namespace fusedops {
Tensor as_rows(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

Tensor activate(const Tensor& z, std::string_view activation) {
  if (activation == "none") return z;
  if (activation == "relu") return at::relu(z);
  if (activation == "silu") return at::silu(z);
  return at::gelu(z, activation == "gelu_tanh" ? "tanh" : "none");
}

Tensor activate_backward(const Tensor& dy, const OptionalTensor& z, std::string_view activation) {
  if (activation == "none") return dy;
  if (activation == "relu") return at::threshold_backward(dy, *z, 0);
  if (activation == "silu") {
    if (!at::GradMode::is_enabled()) return at::silu_backward(dy, *z);
    const auto s = z->sigmoid();  // torch's own has no derivative
    return dy * (s * (1 + *z * (1 - s)));
  }
  return at::gelu_backward(dy, *z, activation == "gelu_tanh" ? "tanh" : "none");
}

LinearForward linear_forward_composite(const Tensor& input, const Tensor& weight,
                                       const OptionalTensor& bias, std::string_view activation,
                                       bool keep_z) {
  linear_check(input, weight, bias, activation);
  const auto z = at::linear(input, weight, bias).contiguous();
  return {activate(z, activation), keep_z && activation != "none" ? z : Tensor()};
}

LinearBackward linear_gradients(const Tensor& dz, const OptionalTensor& input,
                                const OptionalTensor& weight, std::array<bool, 3> output_mask) {
  const auto rows = as_rows(dz);
  Tensor dinput, dweight, dbias;
  if (output_mask[0]) dinput = at::matmul(dz, *weight);
  if (output_mask[1]) {
    dweight = lies_across(weight) ? at::mm(as_rows(*input).t(), rows).t()
                                  : at::mm(rows.t(), as_rows(*input));
  }
  if (output_mask[2]) dbias = rows.sum(0);
  return {dinput, dweight, dbias};
}

LinearBackward linear_backward_composite(const Tensor& dy, const OptionalTensor& input,
                                         const OptionalTensor& weight, const OptionalTensor& z,
                                         std::string_view activation,
                                         std::array<bool, 3> output_mask) {
  linear_backward_outputs(dy, input, weight, z, activation, {});
  const auto [dinput, dweight, dbias] =
      linear_gradients(activate_backward(dy, z, activation), input, weight, output_mask);
  const auto contiguous = [](const Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto across = dweight.defined() && lies_across(weight);
  return {contiguous(dinput), across ? dweight.t().contiguous().t() : contiguous(dweight),
          contiguous(dbias)};
}

}  // namespace fusedops
