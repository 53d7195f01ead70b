// A mixture of experts by its definition, fusedops/references/experts.py.

#include "csrc/ops/reference.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <vector>

#include "csrc/ops/checks.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::experts {
namespace {

// dense: the definition's form that does not read the index.
template <class AnyInputs>
struct Definition {
  const AnyInputs& inputs;
  bool dense;

  static auto fields(auto& d) { return std::tie(d.inputs, d.dense); }
};

void check_index(const Tensor& index, const c10::SymInt& experts) {
  if (index.numel() == 0) return;
  const auto [least, most] = index.aminmax();
  const auto first = least.item<int64_t>(), last = most.item<int64_t>();
  TORCH_CHECK_VALUE(first >= 0 && last <= experts, "experts: top_k_index must be from 0 to ",
                    experts, ", got ", first < 0 ? first : last);
}

// Whether the index cannot be read: in function transforms and traces.
bool is_dense(const Tensor& index) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return keys.included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode) || is_recorded() ||
         !has_numbers(index);
}

Tensor experts_of(const Inputs& a) {
  return call<"fusedops::experts_reference", Tensor>(
      Definition<Inputs>{a, is_dense(a.top_k_index)});
}

Tensor experts_of(const QuantizedInputs& a) {
  return call<"fusedops::quantized_experts_reference", Tensor>(
      Definition<QuantizedInputs>{a, is_dense(a.top_k_index)});
}

}  // namespace

// z is zeros: without a kernel the backward computes it again.
template <class AnyInputs>
ExpertsForward experts_forward_reference(const ForwardOf<AnyInputs>& a) {
  experts_check(a.inputs);
  const Routed n(a.inputs);
  if (!is_dense(n.top_k_index)) check_index(n.top_k_index, n.experts);
  const auto z = a.keep_z ? at::zeros_symint({n.slots(), n.wide()}, n.hidden.options()) : Tensor();
  return {experts_of(a.inputs).contiguous(), z};
}

template ExpertsForward experts_forward_reference(const ForwardOf<Inputs>& a);
template ExpertsForward experts_forward_reference(const ForwardOf<QuantizedInputs>& a);

ExpertsBackward experts_backward_reference(const BackwardArguments& a) {
  const auto& in = a.inputs;
  const auto definition = [&](const std::array<Tensor, 6>& inputs) -> variable_list {
    const auto& [hidden, weights, gate_up, down, gate_up_bias, down_bias] = inputs;
    const auto first_bias = optional(gate_up_bias), second_bias = optional(down_bias);
    return {experts_of(Inputs{hidden, in.top_k_index, weights, gate_up, down, first_bias,
                              second_bias, in.options})};
  };
  const auto [dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias] =
      gradients_of<6>(definition,
                      {in.hidden, in.top_k_weights, in.gate_up, in.down,
                       value_or_undefined(in.gate_up_bias), value_or_undefined(in.down_bias)},
                      a.output_mask, {a.dy});
  return contiguous(ExpertsBackward{dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias});
}

QuantizedExpertsBackward quantized_experts_backward_reference(const QuantizedBackwardArguments& a) {
  const auto& in = a.inputs;
  const auto definition = [&](const std::array<Tensor, 4>& inputs) -> variable_list {
    const auto& [hidden, weights, gate_up_bias, down_bias] = inputs;
    const auto first_bias = optional(gate_up_bias), second_bias = optional(down_bias);
    return {experts_of(QuantizedInputs{hidden, in.top_k_index, weights, in.gate_up, in.down,
                                       first_bias, second_bias, in.weights, in.options})};
  };
  const auto [dhidden, dweights, dgate_up_bias, ddown_bias] =
      gradients_of<4>(definition,
                      {in.hidden, in.top_k_weights, value_or_undefined(in.gate_up_bias),
                       value_or_undefined(in.down_bias)},
                      a.output_mask, {a.dy});
  return contiguous(QuantizedExpertsBackward{dhidden, dweights, dgate_up_bias, ddown_bias});
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("experts_reference(Tensor hidden, Tensor top_k_index, Tensor top_k_weights,"
        " Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, str activation,"
        " bool gated, bool interleaved, bool transposed, float? limit, float alpha,"
        " float up_offset, bool dense) -> Tensor",
        pure);
  m.def("quantized_experts_reference(Tensor hidden, Tensor top_k_index, Tensor top_k_weights,"
        " Tensor gate_up, Tensor gate_up_scales, Tensor? gate_up_zeros, Tensor down,"
        " Tensor down_scales, Tensor? down_zeros, Tensor? gate_up_bias, Tensor? down_bias,"
        " str format, SymInt inner, int gate_up_group_size, int down_group_size, str compute,"
        " str activation, bool gated, bool interleaved, bool transposed, float? limit,"
        " float alpha, float up_offset, bool dense) -> Tensor",
        pure);
}

}  // namespace fusedops::experts
