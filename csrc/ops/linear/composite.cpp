// linear in ATen calls: runs if no kernel does, and in a double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "csrc/ops/linear/operators.h"

namespace fusedops::linear {
namespace {

Tensor activate_backward(const Tensor& dy, const OptionalTensor& z, Activation activation) {
  switch (activation) {
    case Activation::none: return dy;
    case Activation::relu: return at::threshold_backward(dy, *z, 0);
    case Activation::silu: {
      if (!at::GradMode::is_enabled()) return at::silu_backward(dy, *z);
      const auto s = z->sigmoid();  // torch's own has no derivative
      return dy * (s * (1 + *z * (1 - s)));
    }
    default:
      return at::gelu_backward(dy, *z, activation == Activation::gelu_tanh ? "tanh" : "none");
  }
}

}  // namespace

Tensor as_rows(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

Tensor activate(const Tensor& z, Activation activation) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu: return at::relu(z);
    case Activation::silu: return at::silu(z);
    default: return at::gelu(z, activation == Activation::gelu_tanh ? "tanh" : "none");
  }
}

Tensor gradient_of_z(const Tensor& dy, const Tensor& dz, const OptionalTensor& z,
                     Activation activation) {
  if (!dy.defined()) return dz;
  const auto through_y = activate_backward(dy, z, activation);
  return dz.defined() ? through_y + dz : through_y;
}

LinearForward linear_forward_composite(const LinearArguments& a) {
  linear_check(a);
  const auto z = at::linear(a.input, a.weight, a.bias).contiguous();
  return {activate(z, a.activation), a.keeps_z() ? z : Tensor()};
}

LinearBackward linear_gradients(const Tensor& dz, const OptionalTensor& input,
                                const OptionalTensor& weight, std::array<bool, 3> output_mask) {
  const auto rows = as_rows(dz);
  Tensor dinput, dweight, dbias;
  if (output_mask[0]) dinput = at::matmul(dz, *weight);
  if (output_mask[1]) {
    dweight = is_transposed(weight) ? at::mm(as_rows(*input).t(), rows).t()
                                    : at::mm(rows.t(), as_rows(*input));
  }
  if (output_mask[2]) dbias = rows.sum(0);
  return {dinput, dweight, dbias};
}

LinearBackward linear_backward_composite(const LinearBackwardArguments& a) {
  linear_backward_outputs({a.dy, a.input, a.weight, a.z, a.activation, {}});
  const auto dz = gradient_of_z(a.dy, {}, a.z, a.activation);
  const auto found = linear_gradients(dz, a.input, a.weight, a.output_mask);
  if (!a.output_mask[1] || !is_transposed(a.weight)) return contiguous(found);
  const auto& [dinput, dweight, dbias] = found;
  const auto [first, transposed, last] = contiguous(LinearBackward{dinput, dweight.t(), dbias});
  return {first, transposed.t(), last};
}

}  // namespace fusedops::linear
