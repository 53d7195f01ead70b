// The rotary embedding by its definition, fusedops/references/rotary.py.

#include "csrc/ops/reference.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <vector>

#include "csrc/ops/rotary/operators.h"

namespace fusedops::rotary {
namespace {

// The rotation is linear: its gradient is the same for all q and k.
Tensor any_input(const OptionalTensor& gradient, c10::ScalarType dtype) {
  if (!is_defined(gradient)) return Tensor();
  return at::zeros_like(*gradient, gradient->options().dtype(dtype));
}

}  // namespace

RotaryPair rotary_reference(const RotaryForward& a) {
  rotary_check(a);
  return call<"fusedops::rotary_reference", RotaryPair>(a);
}

RotaryPair rotary_forward_reference(const RotaryForward& a) {
  const auto outputs = rotary_outputs(a);
  copy_defined(outputs, rotary_reference(a));
  return outputs;
}

RotaryPair rotary_gradients(const RotaryBackward& a) {
  const auto definition = [&](const std::array<Tensor, 2>& inputs) -> variable_list {
    const auto &q = inputs[0].defined() ? inputs[0] : inputs[1],
               &k = inputs[1].defined() ? inputs[1] : inputs[0];
    const auto [y, z] =
        call<"fusedops::rotary_reference", RotaryPair>(RotaryForward{q, k, a.table});
    return {y, z};
  };
  const variable_list grads{value_or_undefined(a.dq), value_or_undefined(a.dk)};
  const auto [dq, dk] =
      gradients_of<2>(definition, {any_input(a.dq, a.dtype), any_input(a.dk, a.dtype)},
                      {is_defined(a.dq), is_defined(a.dk)}, grads);
  return {dq, dk};
}

RotaryPair rotary_backward_reference(const RotaryBackward& a) {
  const auto outputs = rotary_backward_outputs(a);
  copy_defined(outputs, rotary_gradients(a));
  return outputs;
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  m.def("rotary_reference(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim,"
        " bool interleaved) -> (Tensor q_embed, Tensor k_embed)",
        {at::Tag::pt2_compliant_tag});
}

}  // namespace fusedops::rotary
