// The gated activations' operators: schemas, autograd, and the choice between kernels and the
// definition. Autocast has no rule for them: it has none for F.silu, F.gelu and multiplication.

#include "csrc/ops/autograd.h"
#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::gated_activation {
namespace {

Tensor gated_activation_forward(const GatedArguments& a) {
  return below_autograd([&] { return call<"fusedops::gated_activation_forward", Tensor>(a); });
}

// Saves only gate and up: the backward recomputes the rest.
struct GatedActivationNode {
  static constexpr const char* kName = "FusedGatedActivationBackward";
  static constexpr size_t kInputs = 2;  // gate, up
  enum : size_t { kGate, kUp, kSaved };

  GatedOptions options;

  static auto fields(auto& a) { return std::tie(a.options); }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 2> needs_grad) const {
    if (!grads[0].defined()) return variable_list(2);
    const auto gate = saved[kGate];
    const auto up = optional(saved[kUp]);
    const GatedBackwardArguments a{grads[0], {gate, up, options}, needs_grad};
    const auto [dgate, dup] = at::GradMode::is_enabled()  // double backward: of the definition
                                  ? gated_activation_backward_reference(a)
                                  : call<"fusedops::gated_activation_backward", GatedGradients>(a);
    return {dgate, dup};
  }
};

Tensor with_gradient(const GatedArguments& a) {
  const auto node = node_of<FusedNode<GatedActivationNode>>(a.gate, a.up);
  const auto y = gated_activation_forward(a);
  torch::autograd::set_history(y, node);
  node->backward = {a.options};
  node->saved = {saved(a.gate), saved(a.up)};
  return y;
}

Tensor run(const GatedArguments& a) {
  if (is_defined(a.up) && a.up->scalar_type() != a.gate.scalar_type()) {
    gated_check(a);
    const auto common = c10::promoteTypes(a.gate.scalar_type(), a.up->scalar_type());
    return run({a.gate.to(common), a.up->to(common), a.options});
  }
  if (needs_composite({a.gate, a.up})) return gated_activation_reference(a);
  if (needs_gradient({a.gate, a.up})) return with_gradient(a);
  return gated_activation_forward(a);
}

QuantizedRows run_quantized(const GatedQuantizedArguments& q) {
  const auto& a = q.forward;
  check_no_gradient("swiglu", q.format, {a.gate, a.up});
  if (is_defined(a.up) && a.up->scalar_type() != a.gate.scalar_type()) {
    gated_check(a);
    const auto common = c10::promoteTypes(a.gate.scalar_type(), a.up->scalar_type());
    return run_quantized({{a.gate.to(common), a.up->to(common), a.options}, q.format});
  }
  if (needs_composite({a.gate, a.up})) return gated_activation_quantized_reference(q);
  return below_autograd(
      [&] { return call<"fusedops::gated_activation_quantized", QuantizedRows>(q); });
}

}  // namespace

QuantizedRows swiglu_quantized(const Tensor& gate, const OptionalTensor& up,
                               std::optional<double> limit, double alpha, double up_offset,
                               std::string_view output_format) {
  const auto format = fusedops::output_format("swiglu", output_format);
  return run_quantized({{gate, up, {GatedKind::swiglu, limit, alpha, up_offset}}, format});
}

Tensor swiglu(const Tensor& gate, const OptionalTensor& up, std::optional<double> limit,
              double alpha, double up_offset) {
  return run({gate, up, {GatedKind::swiglu, limit, alpha, up_offset}});
}

Tensor geglu(const Tensor& gate, const OptionalTensor& up, std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "geglu: approximate must be 'none' or 'tanh', got '", approximate, "'");
  const auto kind = approximate == "tanh" ? GatedKind::geglu_tanh : GatedKind::geglu;
  return run({gate, up, {kind, std::nullopt, 1, 0}});
}

const Operators operators([](Operators& o) {
  o.add_public("swiglu(Tensor gate, Tensor? up=None, *, float? limit=None, float alpha=1.0,"
               " float up_offset=0.0) -> Tensor",
               swiglu);
  o.add_public("swiglu_quantized(Tensor gate, Tensor? up=None, *, float? limit=None,"
               " float alpha=1.0, float up_offset=0.0, str output_format='int8')"
               " -> (Tensor codes, Tensor scale)",
               swiglu_quantized);
  o.add_public("geglu(Tensor gate, Tensor? up=None, *, str approximate='none') -> Tensor", geglu);
  o.add_kernel("gated_activation_quantized(Tensor gate, Tensor? up, str kind, float? limit,"
               " float alpha, float up_offset, str output_format)"
               " -> (Tensor codes, Tensor scale)",
               flat<gated_activation_quantized_outputs>,
               flat<gated_activation_quantized_reference>);
  o.add_kernel("gated_activation_forward(Tensor gate, Tensor? up, str kind, float? limit,"
               " float alpha, float up_offset) -> Tensor",
               flat<gated_activation_outputs>, flat<gated_activation_reference>);
  o.add_kernel("gated_activation_backward(Tensor dy, Tensor gate, Tensor? up, str kind,"
               " float? limit, float alpha, float up_offset, bool[2] output_mask)"
               " -> (Tensor dgate, Tensor dup)",
               flat<gated_activation_backward_outputs>, flat<gated_activation_backward_reference>);
});

}  // namespace fusedops::gated_activation
