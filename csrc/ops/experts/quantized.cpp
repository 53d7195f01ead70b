// The quantized_experts operator: schemas, autograd, autocast, and the choice between kernels and
// the definition.

#include "csrc/ops/autograd.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::experts {
namespace {

ExpertsForward forward(const ForwardOf<QuantizedInputs>& a) {
  return below_autograd(
      [&] { return call<"fusedops::quantized_experts_forward", ExpertsForward>(a); });
}

// Saves what the float experts' node saves.
struct QuantizedExpertsNode {
  static constexpr const char* kName = "FusedQuantizedExpertsBackward";
  static constexpr size_t kInputs = 4;  // hidden, weights and both biases
  enum : size_t {
    kHidden,
    kIndex,
    kWeights,
    kGateUp,
    kGateUpScales,
    kGateUpZeros,
    kDown,
    kDownScales,
    kDownZeros,
    kGateUpBias,
    kDownBias,
    kZ,
    kSaved
  };

  QuantizedExperts weights;
  Options options;

  static auto fields(auto& a) { return std::tie(a.weights, a.options); }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 4> needs_grad) const {
    if (!grads[0].defined()) return variable_list(4);
    const auto hidden = saved[kHidden], index = saved[kIndex], slots = saved[kWeights];
    const auto gate_up = saved[kGateUp], gate_up_scales = saved[kGateUpScales];
    const auto down = saved[kDown], down_scales = saved[kDownScales], z = saved[kZ];
    const auto gate_up_zeros = optional(saved[kGateUpZeros]);
    const auto down_zeros = optional(saved[kDownZeros]);
    const auto gate_up_bias = optional(saved[kGateUpBias]), down_bias = optional(saved[kDownBias]);
    const QuantizedBackwardArguments a{grads[0],
                                       {hidden,
                                        index,
                                        slots,
                                        {gate_up, gate_up_scales, gate_up_zeros},
                                        {down, down_scales, down_zeros},
                                        gate_up_bias,
                                        down_bias,
                                        weights,
                                        options},
                                       z,
                                       needs_grad};
    const auto [dhidden, dweights, dgate_up_bias, ddown_bias] =
        at::GradMode::is_enabled()
            ? quantized_experts_backward_reference(a)
            : call<"fusedops::quantized_experts_backward", QuantizedExpertsBackward>(a);
    return {dhidden, dweights, dgate_up_bias, ddown_bias};
  }
};

Tensor with_gradient(const QuantizedInputs& a) {
  const auto node = node_of<FusedNode<QuantizedExpertsNode>>(a.hidden, a.top_k_weights,
                                                             a.gate_up_bias, a.down_bias);
  const auto [y, z] = forward({a, true});
  torch::autograd::set_history(y, node);
  node->backward = {a.weights, a.options};
  node->saved = {saved(a.hidden),          saved(a.top_k_index),    saved(a.top_k_weights),
                 saved(a.gate_up.qweight), saved(a.gate_up.scales), saved(a.gate_up.zeros),
                 saved(a.down.qweight),    saved(a.down.scales),    saved(a.down.zeros),
                 saved(a.gate_up_bias),    saved(a.down_bias),      saved(z)};
  return y;
}

}  // namespace

Tensor quantized_experts(const Tensor& hidden, const Tensor& top_k_index,
                         const Tensor& top_k_weights, const Tensor& gate_up,
                         const Tensor& gate_up_scales, const OptionalTensor& gate_up_zeros,
                         const Tensor& down, const Tensor& down_scales,
                         const OptionalTensor& down_zeros, const OptionalTensor& gate_up_bias,
                         const OptionalTensor& down_bias, std::string_view format,
                         c10::SymInt inner, int64_t gate_up_group_size, int64_t down_group_size,
                         std::optional<std::string_view> compute,
                         std::optional<std::string_view> activation, bool gated, bool interleaved,
                         std::optional<double> limit, double alpha, double up_offset) {
  TORCH_CHECK(!needs_gradient({gate_up_scales, down_scales}),
              "experts: scales must not require a gradient, because quantized weights get none");
  const QuantizedInputs a{hidden,
                          top_k_index,
                          top_k_weights,
                          {gate_up, gate_up_scales, gate_up_zeros},
                          {down, down_scales, down_zeros},
                          gate_up_bias,
                          down_bias,
                          {from_name<WeightFormat>("experts", format), std::move(inner),
                           gate_up_group_size, down_group_size,
                           from_name<Compute>("experts", compute.value_or("any"))},
                          {activation_of(activation), gated, interleaved, false, limit, alpha,
                           up_offset}};
  const Arguments tensors = {hidden, top_k_weights, gate_up_bias, down_bias};
  if (needs_composite(tensors))
    return std::get<0>(experts_forward_reference(ForwardOf<QuantizedInputs>{a, false}));
  if (needs_gradient(tensors)) return with_gradient(a);
  return std::get<0>(forward({a, false}));
}

// Autocast casts as for quantized_linear. Scales and routing weights keep their dtype.
const Operators quantized_operators([](Operators& o) {
  const std::string tensors =
      "Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up,"
      " Tensor gate_up_scales, Tensor? gate_up_zeros, Tensor down, Tensor down_scales,"
      " Tensor? down_zeros, Tensor? gate_up_bias, Tensor? down_bias, str format, SymInt inner,"
      " int gate_up_group_size, int down_group_size, ";
  const std::string inputs = tensors +
                             "str compute, str activation, bool gated, bool interleaved,"
                             " bool transposed, float? limit, float alpha, float up_offset, ";
  o.add_public<quantized_experts, Casts<0, 9, 10>>(
      "quantized_experts(" + tensors +
      "str? compute=None, str? activation='silu', bool gated=True, bool interleaved=False,"
      " float? limit=None, float alpha=1.0, float up_offset=0.0) -> Tensor");
  o.add_kernel("quantized_experts_forward(" + inputs + "bool keep_z) -> (Tensor y, Tensor z)",
               flat<experts_outputs<QuantizedInputs>>,
               flat<experts_forward_reference<QuantizedInputs>>);
  o.add_kernel("quantized_experts_backward(Tensor dy, " + inputs +
                   "Tensor z, bool[4] output_mask) -> (Tensor dhidden, Tensor dtop_k_weights,"
                   " Tensor dgate_up_bias, Tensor ddown_bias)",
               flat<quantized_experts_backward_outputs>,
               flat<quantized_experts_backward_reference>);
});

}  // namespace fusedops::experts
