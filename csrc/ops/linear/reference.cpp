// linear by its definition, torch's own functions: runs if no kernel does, and in a double
// backward.

#include "csrc/ops/reference.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "csrc/ops/linear/operators.h"

namespace fusedops::linear {

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
  if (activation == Activation::none) return dy;
  const auto definition = [&](const std::array<Tensor, 1>& inputs) -> variable_list {
    return {activate(inputs[0], activation)};
  };
  const auto [through_y] = gradients_of<1>(definition, {*z}, {true}, {dy});
  return dz.defined() ? through_y + dz : through_y;
}

LinearForward linear_forward_reference(const LinearArguments& a) {
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

LinearBackward linear_backward_reference(const LinearBackwardArguments& a) {
  const auto outputs = linear_backward_outputs(a);
  const auto dz = gradient_of_z(a.dy, {}, a.z, a.activation);
  copy_defined(outputs, linear_gradients(dz, a.input, a.weight, a.output_mask));
  return outputs;
}

}  // namespace fusedops::linear
