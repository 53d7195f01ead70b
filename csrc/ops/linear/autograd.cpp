// The public operator: schema, autograd, autocast, and the choice between kernels and torch's
// lines.

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>

#include "csrc/ops/autograd.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops {
namespace {

LinearForward linear_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             std::string_view activation, bool keep_z) {
  static const auto op = handle<decltype(linear_outputs)>("fusedops::linear_forward");
  return op.call(input, weight, bias, activation, keep_z);
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
        static const auto op =
            handle<decltype(linear_backward_outputs)>("fusedops::linear_backward");
        return op.call(grads[0], input, weight, z, activation, wanted);
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
  const auto [y, z] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return linear_forward(input, weight, bias, activation, true);
  }();
  torch::autograd::set_history(y, node);
  if (z.defined()) torch::autograd::set_history(z, node);
  node->backward = {std::string(activation)};
  node->saved = {SavedVariable(weight.requires_grad() ? input : Tensor(), false),
                 SavedVariable(input.requires_grad() ? weight : Tensor(), false),
                 SavedVariable(z, true)};
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

// As F.linear under autocast. The activations have no rule there.
template <c10::DispatchKey kKey, c10::DeviceType kDevice>
Tensor linear_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       std::optional<std::string_view> activation) {
  const c10::impl::ExcludeDispatchKeyGuard off(kKey);
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, kDevice); };
  return linear(cast(input), cast(weight), given(bias) ? OptionalTensor(cast(*bias)) : bias,
                activation);
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
  at::AutoDispatchBelowADInplaceOrView below;
  return std::get<0>(linear_forward(input, weight, bias, kind, false));
}

Tensor linear_short(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::optional<std::string_view> activation) {
  // torch.jit.trace records twice, with gradients and without: both must be the same operator.
  if (!is_recorded() &&
      !linear_pays(input, weight, activation.has_value(), needs_gradient({input, weight, bias}))) {
    return activate(at::linear(input, weight, bias), activation_name(activation));
  }
  static const auto op = handle<decltype(linear)>("fusedops::linear");
  return op.call(input, weight, bias, activation);
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None, str? activation=None) -> Tensor",
        pure);
  m.def("linear_forward(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep_z)"
        " -> (Tensor y, Tensor z)",
        pure);
  m.def("linear_backward(Tensor dy, Tensor? input, Tensor? weight, Tensor? z, str activation,"
        " bool[3] output_mask) -> (Tensor dinput, Tensor dweight, Tensor dbias)",
        pure);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) { m.impl("linear", linear); }

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) { m.impl("linear", linear); }

TORCH_LIBRARY_IMPL(fusedops, AutocastCPU, m) {
  m.impl("linear", linear_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(fusedops, AutocastCUDA, m) {
  m.impl("linear", linear_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("linear_forward", linear_forward_composite);
  m.impl("linear_backward", linear_backward_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("linear_forward", linear_outputs);
  m.impl("linear_backward", linear_backward_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("linear_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("linear_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
