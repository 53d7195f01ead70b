// The rotary_embedding operator: schemas, autograd, and the choice between kernels and the
// definition. It has no autocast rule, because its products and sum have none in torch.

#include "csrc/ops/autograd.h"
#include "csrc/ops/rotary/operators.h"

namespace fusedops::rotary {
namespace {

RotaryPair rotary_forward(const RotaryForward& a) {
  return below_autograd([&] { return call<"fusedops::rotary_forward", RotaryPair>(a); });
}

// Saves only cos and sin: the rotation is linear in q and k.
struct RotaryNode {
  static constexpr const char* kName = "FusedRotaryBackward";
  static constexpr size_t kInputs = 2;  // q, k
  enum : size_t { kCos, kSin, kSaved };

  int64_t unsqueeze_dim;
  bool interleaved;
  c10::ScalarType dtype;  // q's and k's dtype

  static auto fields(auto& a) { return std::tie(a.unsqueeze_dim, a.interleaved, a.dtype); }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 2> needs_grad) const {
    const auto dq = needs_grad[0] ? optional(grads[0]) : std::nullopt;
    const auto dk = needs_grad[1] ? optional(grads[1]) : std::nullopt;
    if (!dq && !dk) return variable_list(2);
    const auto cos = saved[kCos], sin = saved[kSin];
    const RotaryBackward a{dq, dk, {cos, sin, unsqueeze_dim, interleaved}, dtype};
    const auto [q, k] = at::GradMode::is_enabled()  // double backward: of the definition
                            ? rotary_gradients(a)
                            : call<"fusedops::rotary_backward", RotaryPair>(a);
    return {q, k};
  }
};

RotaryPair with_gradient(const RotaryForward& a) {
  const auto node = node_of<FusedNode<RotaryNode>>(a.q, a.k);
  const auto [q, k] = rotary_forward(a);
  const variable_list outputs{a.q.requires_grad() ? q : Tensor(),
                              a.k.requires_grad() ? k : Tensor()};
  torch::autograd::set_history(outputs, node);
  node->backward = {a.table.unsqueeze_dim, a.table.interleaved, a.q.scalar_type()};
  node->saved = {saved(a.table.cos), saved(a.table.sin)};
  return {q, k};
}

}  // namespace

RotaryPair rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                            int64_t unsqueeze_dim, bool interleaved) {
  const RotaryForward a{q, k, {cos, sin, unsqueeze_dim, interleaved}};
  if (needs_composite({q, k, cos, sin}) || needs_gradient({cos, sin}) ||
      !rotary_has_kernel(q, k, a.table)) {
    return rotary_reference(a);
  }
  if (needs_gradient({q, k})) return with_gradient(a);
  return rotary_forward(a);
}

const Operators operators([](Operators& o) {
  o.add_public("rotary_embedding(Tensor q, Tensor k, Tensor cos, Tensor sin, *,"
               " int unsqueeze_dim=1, bool interleaved=False)"
               " -> (Tensor q_embed, Tensor k_embed)",
               rotary_embedding);
  o.add_kernel("rotary_forward(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim,"
               " bool interleaved) -> (Tensor q_embed, Tensor k_embed)",
               flat<rotary_outputs>, flat<rotary_forward_reference>);
  o.add_kernel("rotary_backward(Tensor? dq_embed, Tensor? dk_embed, Tensor cos, Tensor sin,"
               " int unsqueeze_dim, bool interleaved, ScalarType dtype)"
               " -> (Tensor dq, Tensor dk)",
               flat<rotary_backward_outputs>, flat<rotary_backward_reference>);
});

}  // namespace fusedops::rotary
