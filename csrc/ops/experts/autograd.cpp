// The experts operator: schemas, autograd, autocast, and the choice between kernels and the
// definition.

#include "csrc/ops/autograd.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::experts {
namespace {

ExpertsForward experts_forward(const ForwardOf<Inputs>& a) {
  return below_autograd([&] { return call<"fusedops::experts_forward", ExpertsForward>(a); });
}

// Saves the inputs and z. The backward recomputes the activated product, which costs less than
// writing and reading it.
struct ExpertsNode {
  static constexpr const char* kName = "FusedExpertsBackward";
  static constexpr size_t kInputs = 6;  // hidden, weights, gate_up, down and their biases
  enum : size_t { kHidden, kIndex, kWeights, kGateUp, kDown, kGateUpBias, kDownBias, kZ, kSaved };

  Options options;

  static auto fields(auto& a) { return std::tie(a.options); }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 6> needs_grad) const {
    if (!grads[0].defined()) return variable_list(6);
    const auto hidden = saved[kHidden], index = saved[kIndex], weights = saved[kWeights];
    const auto gate_up = saved[kGateUp], down = saved[kDown], z = saved[kZ];
    const auto gate_up_bias = optional(saved[kGateUpBias]), down_bias = optional(saved[kDownBias]);
    const BackwardArguments a{grads[0],
                              {hidden, index, weights, gate_up, down, gate_up_bias, down_bias,
                               options},
                              z,
                              needs_grad};
    const auto [dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias] =
        at::GradMode::is_enabled()  // double backward: of the definition, differentiable
            ? experts_backward_reference(a)
            : call<"fusedops::experts_backward", ExpertsBackward>(a);
    return {dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias};
  }
};

Tensor with_gradient(const Inputs& a) {
  const auto node = node_of<FusedNode<ExpertsNode>>(a.hidden, a.top_k_weights, a.gate_up, a.down,
                                                    a.gate_up_bias, a.down_bias);
  const auto [y, z] = experts_forward({a, true});
  torch::autograd::set_history(y, node);
  node->backward = {a.options};
  node->saved = {saved(a.hidden), saved(a.top_k_index),  saved(a.top_k_weights), saved(a.gate_up),
                 saved(a.down),   saved(a.gate_up_bias), saved(a.down_bias),     saved(z)};
  return y;
}

}  // namespace

Activation activation_of(std::optional<std::string_view> name) {
  if (!name) return Activation::none;
  if (*name == "none") refuse_name<Activation>("experts", *name);
  return from_name<Activation>("experts", *name);
}

Tensor experts(const Tensor& hidden, const Tensor& top_k_index, const Tensor& top_k_weights,
               const Tensor& gate_up, const Tensor& down, const OptionalTensor& gate_up_bias,
               const OptionalTensor& down_bias, std::optional<std::string_view> activation,
               bool gated, bool interleaved, bool transposed, std::optional<double> limit,
               double alpha, double up_offset) {
  const auto kind = activation_of(activation);
  const Inputs a{hidden,        top_k_index,
                 top_k_weights, gate_up,
                 down,          gate_up_bias,
                 down_bias,     {kind, gated, interleaved, transposed, limit, alpha, up_offset}};
  const Arguments tensors = {hidden, top_k_weights, gate_up, down, gate_up_bias, down_bias};
  if (needs_composite(tensors))
    return std::get<0>(experts_forward_reference(ForwardOf<Inputs>{a, false}));
  if (needs_gradient(tensors)) return with_gradient(a);
  return std::get<0>(experts_forward({a, false}));
}

// Autocast casts what the products multiply, as for F.linear. The routing weights keep their dtype.
const Operators operators([](Operators& o) {
  o.add_public<experts, Casts<0, 3, 4, 5, 6>>(
      "experts(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up,"
      " Tensor down, *, Tensor? gate_up_bias=None, Tensor? down_bias=None,"
      " str? activation='silu', bool gated=True, bool interleaved=False, bool transposed=False,"
      " float? limit=None, float alpha=1.0, float up_offset=0.0) -> Tensor");
  o.add_kernel("experts_forward(Tensor hidden, Tensor top_k_index, Tensor top_k_weights,"
               " Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias,"
               " str activation, bool gated, bool interleaved, bool transposed, float? limit,"
               " float alpha, float up_offset, bool keep_z) -> (Tensor y, Tensor z)",
               flat<experts_outputs<Inputs>>, flat<experts_forward_reference<Inputs>>);
  o.add_kernel("experts_backward(Tensor dy, Tensor hidden, Tensor top_k_index,"
               " Tensor top_k_weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias,"
               " Tensor? down_bias, str activation, bool gated, bool interleaved, bool transposed,"
               " float? limit, float alpha, float up_offset, Tensor z, bool[6] output_mask)"
               " -> (Tensor dhidden, Tensor dtop_k_weights, Tensor dgate_up, Tensor ddown,"
               " Tensor dgate_up_bias, Tensor ddown_bias)",
               flat<experts_backward_outputs>, flat<experts_backward_reference>);
});

}  // namespace fusedops::experts
