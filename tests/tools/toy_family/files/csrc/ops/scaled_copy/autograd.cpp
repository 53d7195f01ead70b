// scaled_copy's operators: schemas, checks, ATen calls, autograd. The gradient is a scaled copy.

#include <ATen/TensorOperators.h>

#include "csrc/ops/autograd.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/scaled_copy/operators.h"

namespace fusedops::scaled_copy {
namespace {

Tensor forward(const Tensor& x, double scale) {
  return below_autograd([&] {
    return dispatch<"fusedops::scaled_copy_forward", Tensor(const Tensor&, double)>(x, scale);
  });
}

struct ScaledCopyNode {
  static constexpr const char* kName = "FusedScaledCopyBackward";
  static constexpr size_t kInputs = 1, kSaved = 0;

  double scale;

  static auto fields(auto& self) { return std::tie(self.scale); }

  variable_list run(const Saved&, variable_list grads, std::array<bool, 1> needs_grad) const {
    if (!needs_grad[0] || !grads[0].defined()) return variable_list(1);
    return {scaled_copy(grads[0], scale)};
  }
};

}  // namespace

Tensor scaled_copy_outputs(const Tensor& x, double) {
  check_floating("scaled_copy", "x", x);
  return empty_contiguous(x);
}

Tensor scaled_copy_composite(const Tensor& x, double scale) {
  scaled_copy_outputs(x, scale);  // checks
  const auto wide = accumulation_dtype(x.scalar_type());
  return (x.to(wide) * scale).to(x.scalar_type()).contiguous();
}

Tensor scaled_copy(const Tensor& x, double scale) {
  if (needs_composite({x})) return scaled_copy_composite(x, scale);
  if (!needs_gradient({x})) return forward(x, scale);
  const auto node = node_of<FusedNode<ScaledCopyNode>>(x);
  const auto y = forward(x, scale);
  torch::autograd::set_history(y, node);
  node->backward = {scale};
  return y;
}

const Operators operators([](Operators& o) {
  o.add_public("scaled_copy(Tensor x, float scale=1.0) -> Tensor", scaled_copy);
  o.add_kernel("scaled_copy_forward(Tensor x, float scale) -> Tensor", scaled_copy_outputs,
               scaled_copy_composite);
});

}  // namespace fusedops::scaled_copy
