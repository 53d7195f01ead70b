// The gated activations by their definition, fusedops/references/gated_activation.py.

#include "csrc/ops/reference.h"

#include <torch/library.h>

#include <vector>

#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::gated_activation {

Tensor gated_activation_reference(const GatedArguments& a) {
  gated_check(a);
  return call<"fusedops::gated_activation_reference", Tensor>(a).contiguous();
}

QuantizedRows gated_activation_quantized_reference(const GatedQuantizedArguments& a) {
  gated_activation_quantized_outputs(a);
  return contiguous(call<"fusedops::gated_activation_quantized_reference", QuantizedRows>(a));
}

GatedGradients gated_activation_backward_reference(const GatedBackwardArguments& a) {
  const auto& [gate, up, options] = a.forward;
  const auto definition = [&](const std::array<Tensor, 2>& inputs) -> variable_list {
    const auto input_up = optional(inputs[1]);
    const GatedArguments forward{inputs[0], input_up, options};
    return {call<"fusedops::gated_activation_reference", Tensor>(forward)};
  };
  const auto [dgate, dup] =
      gradients_of<2>(definition, {gate, value_or_undefined(up)}, a.output_mask, {a.dy});
  return contiguous(GatedGradients{dgate, dup});
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("gated_activation_reference(Tensor gate, Tensor? up, str kind, float? limit, float alpha,"
        " float up_offset) -> Tensor",
        pure);
  m.def("gated_activation_quantized_reference(Tensor gate, Tensor? up, str kind, float? limit,"
        " float alpha, float up_offset, str output_format) -> (Tensor codes, Tensor scale)",
        pure);
}

}  // namespace fusedops::gated_activation
