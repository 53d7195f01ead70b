// linear_cross_entropy: autograd, autocast, and the choice between kernels and ATen calls.

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "csrc/ops/autograd.h"
#include "csrc/ops/cross_entropy/operators.h"
#include "csrc/ops/cross_entropy/scaled.h"

namespace fusedops {
namespace {

LinearLoss forward(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                   const OptionalTensor& linear_bias, const OptionalTensor& weight,
                   const CrossEntropyOptions& options, c10::ScalarType dtype,
                   std::array<bool, 3> gradients) {
  static const auto op =
      handle<decltype(linear_cross_entropy_outputs)>("fusedops::linear_cross_entropy_forward");
  return op.call(input, linear_weight, target, linear_bias, weight, options.ignore_index,
                 options.reduction, options.how(), dtype, gradients);
}

// Keeps no logits: either the forward has made the gradients, or the backward computes the logits
// again.
struct LinearCrossEntropyNode {
  static constexpr const char* kName = "FusedLinearCrossEntropyBackward";
  static constexpr size_t kInputs = 3;  // input, linear_weight, linear_bias
  enum : size_t { kInput, kLinearWeight, kLinearBias, kTarget, kWeight, kLse, kTotal, kMade };
  static constexpr size_t kSaved = kMade + kInputs;  // from kMade on: the inputs' gradients

  CrossEntropyOptions options;
  bool made;

  static auto fields(auto& self) {
    return std::tuple_cat(CrossEntropyOptions::fields(self.options), std::tie(self.made));
  }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 3> wanted) const {
    variable_list found(kInputs);
    if (!grads[0].defined()) return found;
    if (!made || at::GradMode::is_enabled()) {
      const auto [dinput, dlinear_weight, dlinear_bias] = gradients(saved, grads[0], wanted);
      return {dinput, dlinear_weight, dlinear_bias};
    }
    for (size_t i = 0; i < kInputs; ++i) {
      if (wanted[i]) found[i] = scaled_gradient(saved[kMade + i], grads[0]);
    }
    return found;
  }

  LinearGradients gradients(const Saved& saved, const Tensor& grad,
                            std::array<bool, 3> wanted) const {
    const auto input = saved[kInput], linear_weight = saved[kLinearWeight];
    const auto target = saved[kTarget];
    const auto linear_bias = optional(saved[kLinearBias]), weight = optional(saved[kWeight]);
    if (at::GradMode::is_enabled()) {  // double backward: the formula, differentiable
      return linear_cross_entropy_gradients(grad, input, linear_weight, target, linear_bias, weight,
                                            options, wanted);
    }
    static const auto op = handle<decltype(linear_cross_entropy_backward_outputs)>(
        "fusedops::linear_cross_entropy_backward");
    return op.call(grad, input, linear_weight, target, linear_bias, weight, saved[kLse],
                   saved[kTotal], options.ignore_index, options.reduction, options.how(), wanted);
  }
};

// Whether the forward makes the gradients. It sums a weight's over pieces of the rows, in float32,
// for which the gradient itself is the place where the weight is float32; and of "none" each row's
// gradient of the loss would have to be known.
bool makes_gradients(const Tensor& linear_weight, const CrossEntropyOptions& options) {
  const auto dtype = linear_weight.scalar_type();
  const bool in_place = dtype == at::kFloat;
  return !options.is(Reduction::none) && may_make_gradient(dtype) &&
         (in_place || !linear_weight.requires_grad());
}

Tensor with_gradient(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                     const OptionalTensor& linear_bias, const OptionalTensor& weight,
                     const CrossEntropyOptions& options, c10::ScalarType dtype) {
  const auto bias = value_or_undefined(linear_bias);
  const auto node = make_node<FusedNode<LinearCrossEntropyNode>>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, linear_weight, bias));
  const bool made = makes_gradients(linear_weight, options);
  node->backward = {options, made};
  const auto wanted = [&](const Tensor& t) { return made && needs_gradient({t}); };
  const auto [loss, lse, total, dinput, dlinear_weight, dlinear_bias] = [&] {
    const std::array<bool, 3> gradients{wanted(input), wanted(linear_weight), wanted(bias)};
    at::AutoDispatchBelowADInplaceOrView below;
    return forward(input, linear_weight, target, linear_bias, weight, options, dtype, gradients);
  }();
  torch::autograd::set_history(loss, node);
  const Tensor kept[] = {input, linear_weight, bias,   target,         value_or_undefined(weight),
                         lse,   total,         dinput, dlinear_weight, dlinear_bias};
  for (size_t i = 0; i < std::size(kept); ++i) node->saved[i] = SavedVariable(kept[i], false);
  return loss;
}

bool has_kernel(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                const OptionalTensor& linear_bias, const OptionalTensor& weight) {
  return linear_weight.dim() == 2 && target.scalar_type() == at::kLong &&
         !needs_composite({input, linear_weight, linear_bias, weight}) && !needs_gradient({weight});
}

// [..., H] as rows.
Tensor as_matrix(const Tensor& input) {
  if (input.dim() == 2) return input;
  return input.dim() == 1 ? input.unsqueeze(0) : input.flatten(0, -2);
}

// The formula with all logits.
Tensor plain(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
             const OptionalTensor& linear_bias, const OptionalTensor& weight,
             const CrossEntropyOptions& options, std::optional<c10::ScalarType> dtype) {
  const auto bias = given(linear_bias) ? OptionalTensor(linear_bias->flatten()) : std::nullopt;
  auto logits = at::linear(input, linear_weight.flatten(0, -2), bias);
  if (linear_weight.dim() == 2 && input.dim() > 2) {
    const bool indices = !at::isFloatingType(target.scalar_type());
    const auto targets = indices ? target.flatten() : target.flatten(0, -2);
    const auto loss = cross_entropy_formula(logits.flatten(0, -2), targets, weight, options, dtype);
    const auto rows = input.sym_sizes().slice(0, input.dim() - 1);
    return options.is(Reduction::none) ? loss.view_symint(rows) : loss;
  }
  if (linear_weight.dim() > 2) {
    const auto classes = linear_weight.sym_sizes().slice(0, linear_weight.dim() - 1);
    logits = logits.unflatten_symint(-1, classes);
  }
  return cross_entropy_formula(logits, target, weight, options, dtype);
}

template <c10::DispatchKey key, c10::DeviceType device>
Tensor linear_cross_entropy_autocast(const Tensor& input, const Tensor& linear_weight,
                                     const Tensor& target, const OptionalTensor& linear_bias,
                                     const OptionalTensor& weight, int64_t ignore_index,
                                     std::string_view reduction, double label_smoothing,
                                     double z_loss, std::optional<double> softcap,
                                     std::optional<double> scale,
                                     std::optional<c10::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard off(key);
  const auto to = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(to, t, device); };
  const auto bias = given(linear_bias) ? OptionalTensor(cast(*linear_bias)) : std::nullopt;
  const auto x = cast(input);
  const auto wide = dtype.value_or(accumulation_dtype(x.scalar_type()));
  static const auto op = handle<decltype(linear_cross_entropy)>("fusedops::linear_cross_entropy");
  return op.call(x, cast(linear_weight), target, bias, weight, ignore_index, reduction,
                 label_smoothing, z_loss, softcap, scale, wide);
}

}  // namespace

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const OptionalTensor& linear_bias, const OptionalTensor& weight,
                            int64_t ignore_index, std::string_view reduction,
                            double label_smoothing, double z_loss, std::optional<double> softcap,
                            std::optional<double> scale, std::optional<c10::ScalarType> dtype) {
  const CrossEntropyOptions options("linear_cross_entropy", ignore_index, reduction,
                                    label_smoothing, z_loss, softcap, scale);
  linear_cross_entropy_check(input, linear_weight, target, linear_bias, weight, dtype);
  if (!has_kernel(input, linear_weight, target, linear_bias, weight)) {
    return plain(input, linear_weight, target, linear_bias, weight, options, dtype);
  }
  const auto rows = as_matrix(input);
  const auto targets = as_vector(target);
  const auto to = dtype.value_or(input.scalar_type());
  const auto loss = [&] {
    if (needs_gradient({rows, linear_weight, linear_bias})) {
      return with_gradient(rows, linear_weight, targets, linear_bias, weight, options, to);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return std::get<0>(forward(rows, linear_weight, targets, linear_bias, weight, options, to, {}));
  }();
  return options.is(Reduction::none) ? loss.view_symint(target.sym_sizes()) : loss;
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy);
}

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy);
}

TORCH_LIBRARY_IMPL(fusedops, AutocastCPU, m) {
  m.impl("linear_cross_entropy",
         linear_cross_entropy_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(fusedops, AutocastCUDA, m) {
  m.impl("linear_cross_entropy",
         linear_cross_entropy_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_composite);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_outputs);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("linear_cross_entropy_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("linear_cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
