// The public operators: schema, autograd, and the choice between kernels and ATen calls. Autocast
// has no rule for them, as it has none for F.silu, F.gelu and the product.

#include <torch/library.h>

#include <string>

#include "csrc/ops/autograd.h"
#include "csrc/ops/gated_activation/operators.h"

namespace fusedops {
namespace {

Tensor gated_activation_forward(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
                                std::optional<double> limit, double alpha, double up_offset) {
  static const auto op =
      handle<decltype(gated_activation_outputs)>("fusedops::gated_activation_forward");
  return op.call(gate, up, kind, limit, alpha, up_offset);
}

// Keeps gate and up alone: the backward computes the rest again.
struct GatedActivationNode {
  static constexpr const char* kName = "FusedGatedActivationBackward";
  static constexpr size_t kInputs = 2;  // gate, up
  enum : size_t { kGate, kUp, kSaved };

  std::string kind;
  std::optional<double> limit;
  double alpha, up_offset;

  static auto fields(auto& self) {
    return std::tie(self.kind, self.limit, self.alpha, self.up_offset);
  }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 2> wanted) const {
    if (!grads[0].defined()) return variable_list(2);
    const auto [dgate, dup] = gradients(grads[0], saved[kGate], optional(saved[kUp]), wanted);
    return {dgate, dup};
  }

  GatedGradients gradients(const Tensor& dy, const Tensor& gate, const OptionalTensor& up,
                           std::array<bool, 2> wanted) const {
    if (at::GradMode::is_enabled()) {  // double backward: the formula, differentiable
      return gated_activation_backward_composite(dy, gate, up, kind, limit, alpha, up_offset,
                                                 wanted);
    }
    static const auto op =
        handle<decltype(gated_activation_backward_outputs)>("fusedops::gated_activation_backward");
    return op.call(dy, gate, up, kind, limit, alpha, up_offset, wanted);
  }
};

Tensor with_gradient(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
                     std::optional<double> limit, double alpha, double up_offset) {
  const auto node = make_node<FusedNode<GatedActivationNode>>();
  node->set_next_edges(torch::autograd::collect_next_edges(gate, value_or_undefined(up)));
  const auto y = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return gated_activation_forward(gate, up, kind, limit, alpha, up_offset);
  }();
  torch::autograd::set_history(y, node);
  node->backward = {std::string(kind), limit, alpha, up_offset};
  node->saved = {SavedVariable(gate, false), SavedVariable(value_or_undefined(up), false)};
  return y;
}

Tensor run(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
           std::optional<double> limit, double alpha, double up_offset) {
  if (given(up) && up->scalar_type() != gate.scalar_type()) {
    gated_check(gate, up, kind, limit);
    const auto common = c10::promoteTypes(gate.scalar_type(), up->scalar_type());
    return run(gate.to(common), up->to(common), kind, limit, alpha, up_offset);
  }
  if (needs_composite({gate, up})) {
    return gated_activation_composite(gate, up, kind, limit, alpha, up_offset);
  }
  if (needs_gradient({gate, up})) {
    return with_gradient(gate, up, kind, limit, alpha, up_offset);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return gated_activation_forward(gate, up, kind, limit, alpha, up_offset);
}

}  // namespace

Tensor swiglu(const Tensor& gate, const OptionalTensor& up, std::optional<double> limit,
              double alpha, double up_offset) {
  return run(gate, up, "swiglu", limit, alpha, up_offset);
}

Tensor geglu(const Tensor& gate, const OptionalTensor& up, std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "geglu: approximate must be 'none' or 'tanh', got '", approximate, "'");
  return run(gate, up, approximate == "tanh" ? "geglu_tanh" : "geglu", std::nullopt, 1, 0);
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("swiglu(Tensor gate, Tensor? up=None, *, float? limit=None, float alpha=1.0,"
        " float up_offset=0.0) -> Tensor",
        pure);
  m.def("geglu(Tensor gate, Tensor? up=None, *, str approximate='none') -> Tensor", pure);
  m.def("gated_activation_forward(Tensor gate, Tensor? up, str kind, float? limit, float alpha,"
        " float up_offset) -> Tensor",
        pure);
  m.def("gated_activation_backward(Tensor dy, Tensor gate, Tensor? up, str kind, float? limit,"
        " float alpha, float up_offset, bool[2] output_mask) -> (Tensor dgate, Tensor dup)",
        pure);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) {
  m.impl("swiglu", swiglu);
  m.impl("geglu", geglu);
}

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) {
  m.impl("swiglu", swiglu);
  m.impl("geglu", geglu);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("gated_activation_forward", gated_activation_composite);
  m.impl("gated_activation_backward", gated_activation_backward_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("gated_activation_forward", gated_activation_outputs);
  m.impl("gated_activation_backward", gated_activation_backward_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("gated_activation_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("gated_activation_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
