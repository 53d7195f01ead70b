// scaled_add's public operator: schema, autograd, and the choice of kernel.

#include "csrc/ops/autograd.h"
#include "csrc/ops/scaled_add/operators.h"

namespace fusedops::scaled_add {
namespace {

Tensor scaled_add_forward(const ScaledAddForward& a) {
  return below_autograd([&] { return call<"fusedops::scaled_add_forward", Tensor>(a); });
}

// Keeps no tensor: the sum is linear in both.
struct ScaledAddNode {
  static constexpr const char* kName = "FusedScaledAddBackward";
  static constexpr size_t kInputs = 2;  // x, residual
  enum : size_t { kSaved };

  double scale;

  static auto fields(auto& self) { return std::tie(self.scale); }

  variable_list run(const Saved&, variable_list grads, std::array<bool, 2> wanted) const {
    const auto& dy = grads[0];
    if (!dy.defined()) return variable_list(2);
    const auto dresidual = [&]() -> Tensor {
      if (!wanted[1]) return {};
      if (at::GradMode::is_enabled()) return scaled_add_backward_composite({dy, scale});
      return call<"fusedops::scaled_add_backward", Tensor>(ScaledAddBackward{dy, scale});
    };
    return {wanted[0] ? dy : Tensor(), dresidual()};
  }
};

Tensor with_gradient(const ScaledAddForward& a) {
  const auto node = node_of<FusedNode<ScaledAddNode>>(a.x, a.residual);
  const auto y = scaled_add_forward(a);
  torch::autograd::set_history(y, node);
  node->backward = {a.scale};
  return y;
}

}  // namespace

Tensor scaled_add(const Tensor& x, const Tensor& residual, double scale) {
  const ScaledAddForward a{x, residual, scale};
  if (needs_composite({x, residual})) return scaled_add_composite(a);
  if (needs_gradient({x, residual})) return with_gradient(a);
  return scaled_add_forward(a);
}

const Operators operators([](Operators& o) {
  o.add_public("scaled_add(Tensor x, Tensor residual, float scale=1.0) -> Tensor", scaled_add);
  o.add_kernel("scaled_add_forward(Tensor x, Tensor residual, float scale) -> Tensor",
               flat<scaled_add_outputs>, flat<scaled_add_composite>);
  o.add_kernel("scaled_add_backward(Tensor dy, float scale) -> Tensor",
               flat<scaled_add_backward_outputs>, flat<scaled_add_backward_composite>);
});

}  // namespace fusedops::scaled_add
