// The public operator: schema, autograd, and the choice between kernels and ATen calls. Autocast
// has no rule for it, as it has none for the products and the sum.

#include <torch/library.h>

#include "csrc/ops/autograd.h"
#include "csrc/ops/rotary/operators.h"

namespace fusedops {
namespace {

RotaryPair rotary_forward(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                          int64_t unsqueeze_dim, bool interleaved) {
  static const auto op = handle<decltype(rotary_outputs)>("fusedops::rotary_forward");
  return op.call(q, k, cos, sin, unsqueeze_dim, interleaved);
}

// Keeps cos and sin alone: the rotation is linear in q and k.
struct RotaryNode {
  static constexpr const char* kName = "FusedRotaryBackward";
  static constexpr size_t kInputs = 2;  // q, k
  enum : size_t { kCos, kSin, kSaved };

  int64_t unsqueeze_dim;
  bool interleaved;
  c10::ScalarType dtype;  // of q and k

  static auto fields(auto& self) {
    return std::tie(self.unsqueeze_dim, self.interleaved, self.dtype);
  }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 2> wanted) const {
    const auto dq = wanted[0] ? optional(grads[0]) : std::nullopt;
    const auto dk = wanted[1] ? optional(grads[1]) : std::nullopt;
    if (!dq && !dk) return variable_list(2);
    const auto [q, k] = gradients(dq, dk, saved[kCos], saved[kSin]);
    return {q, k};
  }

  RotaryPair gradients(const OptionalTensor& dq, const OptionalTensor& dk, const Tensor& cos,
                       const Tensor& sin) const {
    if (at::GradMode::is_enabled()) {  // double backward: the formula, differentiable
      return rotary_backward_formula(dq, dk, cos, sin, unsqueeze_dim, interleaved, dtype);
    }
    static const auto op = handle<decltype(rotary_backward_outputs)>("fusedops::rotary_backward");
    return op.call(dq, dk, cos, sin, unsqueeze_dim, interleaved, dtype);
  }
};

RotaryPair with_gradient(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                         int64_t unsqueeze_dim, bool interleaved) {
  const auto node = make_node<FusedNode<RotaryNode>>();
  node->set_next_edges(torch::autograd::collect_next_edges(q, k));
  const auto [q_out, k_out] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return rotary_forward(q, k, cos, sin, unsqueeze_dim, interleaved);
  }();
  const variable_list outputs{q.requires_grad() ? q_out : Tensor(),
                              k.requires_grad() ? k_out : Tensor()};
  torch::autograd::set_history(outputs, node);
  node->backward = {unsqueeze_dim, interleaved, q.scalar_type()};
  node->saved = {SavedVariable(cos, false), SavedVariable(sin, false)};
  return {q_out, k_out};
}

}  // namespace

RotaryPair rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                            int64_t unsqueeze_dim, bool interleaved) {
  if (needs_composite({q, k, cos, sin}) || needs_gradient({cos, sin}) ||
      !rotary_has_kernel(q, k, cos, unsqueeze_dim)) {
    rotary_check(q, k, cos, sin, unsqueeze_dim);
    return rotary_formula(q, k, cos, sin, unsqueeze_dim, interleaved);
  }
  if (needs_gradient({q, k})) return with_gradient(q, k, cos, sin, unsqueeze_dim, interleaved);
  at::AutoDispatchBelowADInplaceOrView below;
  return rotary_forward(q, k, cos, sin, unsqueeze_dim, interleaved);
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("rotary_embedding(Tensor q, Tensor k, Tensor cos, Tensor sin, *, int unsqueeze_dim=1,"
        " bool interleaved=False) -> (Tensor q_embed, Tensor k_embed)",
        pure);
  m.def("rotary_forward(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim,"
        " bool interleaved) -> (Tensor q_embed, Tensor k_embed)",
        pure);
  m.def("rotary_backward(Tensor? dq_embed, Tensor? dk_embed, Tensor cos, Tensor sin,"
        " int unsqueeze_dim, bool interleaved, ScalarType dtype) -> (Tensor dq, Tensor dk)",
        pure);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) {
  m.impl("rotary_embedding", rotary_embedding);
}

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) { m.impl("rotary_embedding", rotary_embedding); }

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("rotary_forward", rotary_composite);
  m.impl("rotary_backward", rotary_backward_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("rotary_forward", rotary_outputs);
  m.impl("rotary_backward", rotary_backward_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("rotary_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("rotary_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
