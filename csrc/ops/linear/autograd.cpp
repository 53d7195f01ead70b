// The public operator: schema, autograd, autocast, and the choice between kernels and torch's
// lines.

#include <ATen/Functions.h>

#include <string>

#include "csrc/ops/autograd.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops {
namespace {

LinearForward linear_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             std::string_view activation, bool keep_z) {
  return dispatch<"fusedops::linear_forward", decltype(linear_outputs)>(input, weight, bias,
                                                                        activation, keep_z);
}

// Keeps what torch's nodes keep: input for dweight, weight for dinput, z for the activation. z is
// an output of the node that nobody sees but its own double backward, which so needs no second
// product.
struct LinearNode {
  static constexpr const char* kName = "FusedLinearBackward";
  static constexpr size_t kInputs = 3;  // input, weight, bias
  enum : size_t { kInput, kWeight, kZ, kSaved };

  std::string activation;

  static auto fields(auto& self) { return std::tie(self.activation); }

  // grads: of y and, in a double backward, of z.
  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 3> wanted) const {
    const bool through_z = grads.size() > 1 && grads[1].defined();
    if (!grads[0].defined() && !through_z) return variable_list(3);
    const auto input = optional(saved[kInput]), weight = optional(saved[kWeight]);
    const auto z = optional(saved[kZ]);
    const auto [dinput, dweight, dbias] = [&] {
      if (!through_z && !at::GradMode::is_enabled()) {
        return dispatch<"fusedops::linear_backward", decltype(linear_backward_outputs)>(
            grads[0], input, weight, z, activation, wanted);
      }
      auto dz = grads[0].defined() ? activate_backward(grads[0], z, activation) : grads[1];
      if (grads[0].defined() && through_z) dz = dz + grads[1];
      return linear_gradients(dz, input, weight, wanted);
    }();
    return {dinput, dweight, dbias};
  }
};

Tensor with_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     std::string_view activation) {
  const auto node = make_node<FusedNode<LinearNode>>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(input, weight, value_or_undefined(bias)));
  const auto [y, z] =
      below_autograd([&] { return linear_forward(input, weight, bias, activation, true); });
  torch::autograd::set_history(y, node);
  if (z.defined()) torch::autograd::set_history(z, node);
  node->backward = {std::string(activation)};
  node->saved = {saved(weight.requires_grad() ? input : Tensor()),
                 saved(input.requires_grad() ? weight : Tensor()), SavedVariable(z, true)};
  return y;
}

bool alike(const Tensor& t, const Tensor& input) {
  return t.scalar_type() == input.scalar_type() && t.device() == input.device() &&
         t.layout() == at::kStrided;
}

// Whether the kernels take the arguments. What they do not is torch's, with its own errors.
bool has_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto dtype = input.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  if (input.dim() == 0 || weight.dim() != 2 || input.is_nested() || input.is_meta()) return false;
  if (!alike(input, input) || !alike(weight, input)) return false;
  if (weight.sym_size(1) != input.sym_size(-1)) return false;
  return !given(bias) ||
         (alike(*bias, input) && bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0));
}

std::string_view activation_name(std::optional<std::string_view> activation) {
  if (!activation.has_value()) return "none";
  TORCH_CHECK_VALUE(*activation == "relu" || *activation == "gelu" || *activation == "gelu_tanh" ||
                        *activation == "silu",
                    "linear: activation must be None, 'relu', 'gelu', 'gelu_tanh' or 'silu', got '",
                    *activation, "'");
  return *activation;
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              std::optional<std::string_view> activation) {
  const auto kind = activation_name(activation);
  const bool trains = needs_gradient({input, weight, bias});
  if (!linear_pays(input, weight, kind != "none", trains) || !has_kernel(input, weight, bias) ||
      needs_composite({input, weight, bias})) {
    return activate(at::linear(input, weight, bias), kind);
  }
  if (trains) return with_gradient(input, weight, bias, kind);
  return std::get<0>(
      below_autograd([&] { return linear_forward(input, weight, bias, kind, false); }));
}

Tensor linear_short(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::optional<std::string_view> activation) {
  // torch.jit.trace records twice, with gradients and without: both must be the same operator.
  if (!is_recorded() &&
      !linear_pays(input, weight, activation.has_value(), needs_gradient({input, weight, bias}))) {
    return activate(at::linear(input, weight, bias), activation_name(activation));
  }
  return dispatch<"fusedops::linear", decltype(linear)>(input, weight, bias, activation);
}

// Autocast as F.linear's. The activations have no rule there.
const Operators operators([](Operators& o) {
  o.add_public<linear, Casts<0, 1, 2>>(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, str? activation=None) -> Tensor",
      {.takes_nested = true});
  o.add_kernel("linear_forward(Tensor input, Tensor weight, Tensor? bias, str activation,"
               " bool keep_z) -> (Tensor y, Tensor z)",
               linear_outputs, linear_forward_composite);
  o.add_kernel("linear_backward(Tensor dy, Tensor? input, Tensor? weight, Tensor? z,"
               " str activation, bool[3] output_mask)"
               " -> (Tensor dinput, Tensor dweight, Tensor dbias)",
               linear_backward_outputs, linear_backward_composite);
});

}  // namespace fusedops
