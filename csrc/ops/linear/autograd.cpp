// The linear operator: schemas, autograd, autocast, and the choice between kernels and torch's own
// functions.

#include <ATen/Functions.h>

#include "csrc/ops/autograd.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::linear {
namespace {

LinearForward linear_forward(const LinearArguments& a) {
  return below_autograd([&] { return call<"fusedops::linear_forward", LinearForward>(a); });
}

// Saves what torch's nodes save: input for dweight, weight for dinput, z for the activation. z is
// an output that only the node's own double backward sees, which so needs no second product.
struct LinearNode {
  static constexpr const char* kName = "FusedLinearBackward";
  static constexpr size_t kInputs = 3;  // input, weight, bias
  enum : size_t { kInput, kWeight, kZ, kSaved };

  Activation activation;

  static auto fields(auto& a) { return std::tie(a.activation); }

  // grads: the gradients of y and, in a double backward, of z.
  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 3> needs_grad) const {
    const bool through_z = grads.size() > 1 && grads[1].defined();
    if (!grads[0].defined() && !through_z) return variable_list(3);
    const auto input = optional(saved[kInput]), weight = optional(saved[kWeight]);
    const auto z = optional(saved[kZ]);
    const auto [dinput, dweight, dbias] = [&] {
      if (!through_z && !at::GradMode::is_enabled()) {
        return call<"fusedops::linear_backward", LinearBackward>(
            LinearBackwardArguments{grads[0], input, weight, z, activation, needs_grad});
      }
      const auto dz = gradient_of_z(grads[0], through_z ? grads[1] : Tensor(), z, activation);
      return linear_gradients(dz, input, weight, needs_grad);
    }();
    return {dinput, dweight, dbias};
  }
};

Tensor with_gradient(const LinearArguments& a) {
  const auto node = node_of<FusedNode<LinearNode>>(a.input, a.weight, a.bias);
  const auto [y, z] = linear_forward(a);
  torch::autograd::set_history(y, node);
  if (z.defined()) torch::autograd::set_history(z, node);
  node->backward = {a.activation};
  node->saved = {saved(a.weight.requires_grad() ? a.input : Tensor()),
                 saved(a.input.requires_grad() ? a.weight : Tensor()), SavedVariable(z, true)};
  return y;
}

bool matches(const Tensor& t, const Tensor& input) {
  return t.scalar_type() == input.scalar_type() && t.device() == input.device() &&
         t.layout() == at::kStrided;
}

// Whether the kernels take the arguments. Others go to torch, which raises its own errors.
bool has_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto dtype = input.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  if (input.dim() == 0 || weight.dim() != 2 || input.is_nested() || input.is_meta()) return false;
  if (!matches(input, input) || !matches(weight, input)) return false;
  if (weight.sym_size(1) != input.sym_size(-1)) return false;
  return !is_defined(bias) ||
         (matches(*bias, input) && bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0));
}

Activation activation_of(std::optional<std::string_view> name) {
  if (!name) return Activation::none;
  if (*name == "none") refuse_name<Activation>("linear", *name);
  return from_name<Activation>("linear", *name);
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              std::optional<std::string_view> activation) {
  const auto kind = activation_of(activation);
  const bool trains = needs_gradient({input, weight, bias});
  if (!linear_pays(input, weight, kind != Activation::none, trains) ||
      !has_kernel(input, weight, bias) || needs_composite({input, weight, bias})) {
    return activate(at::linear(input, weight, bias), kind);
  }
  const LinearArguments a{input, weight, bias, kind, trains};
  return trains ? with_gradient(a) : std::get<0>(linear_forward(a));
}

Tensor linear_short(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::optional<std::string_view> activation) {
  // torch.jit.trace records twice, with and without gradients: both must record the same operator.
  if (!is_recorded() &&
      !linear_pays(input, weight, activation.has_value(), needs_gradient({input, weight, bias}))) {
    return activate(at::linear(input, weight, bias), activation_of(activation));
  }
  return dispatch<"fusedops::linear", decltype(linear)>(input, weight, bias, activation);
}

// Autocast casts as for F.linear. Activations have no autocast rule in torch.
const Operators operators([](Operators& o) {
  o.add_public<linear, Casts<0, 1, 2>>(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, str? activation=None) -> Tensor",
      {.takes_nested = true});
  o.add_kernel("linear_forward(Tensor input, Tensor weight, Tensor? bias, str activation,"
               " bool keep_z) -> (Tensor y, Tensor z)",
               flat<linear_outputs>, flat<linear_forward_reference>);
  o.add_kernel("linear_backward(Tensor dy, Tensor? input, Tensor? weight, Tensor? z,"
               " str activation, bool[3] output_mask)"
               " -> (Tensor dinput, Tensor dweight, Tensor dbias)",
               flat<linear_backward_outputs>, flat<linear_backward_reference>);
});

}  // namespace fusedops::linear
