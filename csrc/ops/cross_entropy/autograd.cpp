// cross_entropy: autograd, autocast, and the choice between kernels and ATen calls. The schemas of
// both operators.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <cmath>

#include "csrc/ops/autograd.h"
#include "csrc/ops/cross_entropy/operators.h"
#include "csrc/ops/cross_entropy/scaled.h"

namespace fusedops {
namespace {

Loss forward(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
             const CrossEntropyOptions& options, c10::ScalarType dtype, bool with_gradient) {
  static const auto op = handle<decltype(cross_entropy_outputs)>("fusedops::cross_entropy_forward");
  return op.call(input, target, weight, options.ignore_index, options.reduction, options.how(),
                 dtype, with_gradient);
}

// Keeps the logits, or the gradient that the forward has made.
struct CrossEntropyNode {
  static constexpr const char* kName = "FusedCrossEntropyBackward";
  static constexpr size_t kInputs = 1;
  enum : size_t { kInput, kTarget, kWeight, kLse, kTotal, kSaved };

  CrossEntropyOptions options;
  bool made;  // the saved input is its gradient

  static auto fields(auto& self) {
    return std::tuple_cat(CrossEntropyOptions::fields(self.options), std::tie(self.made));
  }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 1>) const {
    if (!grads[0].defined()) return variable_list(1);
    return {gradient(saved, grads[0])};
  }

  Tensor gradient(const Saved& saved, const Tensor& grad) const {
    if (made) {
      TORCH_CHECK(!at::GradMode::is_enabled(),
                  "cross_entropy: grad_in_forward=True keeps no logits, so it has no double "
                  "backward");
      return scaled_gradient(saved[kInput], grad);
    }
    const auto input = saved[kInput], target = saved[kTarget];
    const auto weight = optional(saved[kWeight]);
    if (at::GradMode::is_enabled()) {  // double backward: the formula, differentiable
      return cross_entropy_gradient(grad, input, target, weight, options);
    }
    static const auto op =
        handle<decltype(cross_entropy_backward_outputs)>("fusedops::cross_entropy_backward");
    return op.call(grad, input, target, weight, saved[kLse], saved[kTotal], options.ignore_index,
                   options.reduction, options.how());
  }
};

Tensor with_gradient(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     const CrossEntropyOptions& options, c10::ScalarType dtype,
                     bool grad_in_forward) {
  const bool made = grad_in_forward && may_make_gradient(input.scalar_type());
  const auto node = make_node<FusedNode<CrossEntropyNode>>();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  const auto [loss, lse, total, dinput] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return forward(input, target, weight, options, dtype, made);
  }();
  torch::autograd::set_history(loss, node);
  node->backward = {options, made};
  node->saved[CrossEntropyNode::kInput] = SavedVariable(made ? dinput : input, false);
  if (made) return loss;
  node->saved[CrossEntropyNode::kTarget] = SavedVariable(target, false);
  node->saved[CrossEntropyNode::kWeight] = SavedVariable(value_or_undefined(weight), false);
  node->saved[CrossEntropyNode::kLse] = SavedVariable(lse, false);
  node->saved[CrossEntropyNode::kTotal] = SavedVariable(total, false);
  return loss;
}

// Whether the kernels take it: rows of logits, and classes to find among them.
bool has_kernel(const Tensor& input, const Tensor& target, const OptionalTensor& weight) {
  return input.dim() == 2 && (input.sym_stride(1) == 1 || input.sym_size(1) == 1) &&
         target.scalar_type() == at::kLong && !needs_composite({input, weight}) &&
         !needs_gradient({weight});
}

// [N, C, ...] as rows, where the classes lie side by side.
Tensor classes_last(const Tensor& input) {
  if (input.dim() == 1) return input.unsqueeze(0);
  if (input.dim() == 2) return input;
  const auto last = input.movedim(1, -1);
  if (last.sym_stride(-1) != 1 || input.scalar_type() == at::kDouble) return input;
  return last.flatten(0, -2);
}

Tensor of_rows(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
               const CrossEntropyOptions& options, bool grad_in_forward, c10::ScalarType dtype) {
  if (needs_gradient({input})) {
    return with_gradient(input, target, weight, options, dtype, grad_in_forward);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return std::get<0>(forward(input, target, weight, options, dtype, false));
}

c10::ScalarType autocast_dtype(const Tensor& input, std::optional<c10::ScalarType> dtype) {
  return dtype.value_or(accumulation_dtype(input.scalar_type()));
}

Tensor cross_entropy_autocast(const Tensor& input, const Tensor& target,
                              const OptionalTensor& weight, int64_t ignore_index,
                              std::string_view reduction, double label_smoothing, double z_loss,
                              std::optional<double> softcap, std::optional<double> scale,
                              bool grad_in_forward, std::optional<c10::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::autocast_dispatch_keyset);
  static const auto op = handle<decltype(cross_entropy)>("fusedops::cross_entropy");
  return op.call(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap,
                 scale, grad_in_forward, autocast_dtype(input, dtype));
}

}  // namespace

CrossEntropyOptions::CrossEntropyOptions(const char* op, int64_t ignore_index,
                                         std::string_view reduction, double label_smoothing,
                                         double z_loss, std::optional<double> softcap,
                                         std::optional<double> scale)
    : ignore_index(ignore_index),
      reduction(static_cast<int64_t>(reduction == "none"  ? Reduction::none
                                     : reduction == "sum" ? Reduction::sum
                                                          : Reduction::mean)),
      label_smoothing(label_smoothing),
      z_loss(z_loss),
      map{scale.value_or(1), softcap.value_or(0)} {
  TORCH_CHECK_VALUE(reduction == "none" || reduction == "sum" || reduction == "mean", op,
                    ": reduction must be 'none', 'mean' or 'sum', got '", reduction, "'");
  TORCH_CHECK(label_smoothing >= 0 && label_smoothing <= 1, op,
              ": label_smoothing must be from 0 to 1, got ", label_smoothing);
  TORCH_CHECK_VALUE(!softcap || (*softcap > 0 && std::isfinite(*softcap)), op,
                    ": softcap must be above 0 and finite, got ", softcap.value_or(0));
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     int64_t ignore_index, std::string_view reduction, double label_smoothing,
                     double z_loss, std::optional<double> softcap, std::optional<double> scale,
                     bool grad_in_forward, std::optional<c10::ScalarType> dtype) {
  const CrossEntropyOptions options("cross_entropy", ignore_index, reduction, label_smoothing,
                                    z_loss, softcap, scale);
  cross_entropy_check("cross_entropy", input, input.sym_sizes(), target, weight, dtype);
  const bool indices = target.scalar_type() == at::kLong;
  const auto rows = indices ? classes_last(input) : input;
  if (!indices || rows.dim() != 2 || !has_kernel(rows, target, weight)) {
    return cross_entropy_formula(input, target, weight, options, dtype);
  }
  const auto loss = of_rows(rows, as_vector(target), weight, options, grad_in_forward,
                            dtype.value_or(input.scalar_type()));
  return options.is(Reduction::none) ? loss.view_symint(target.sym_sizes()) : loss;
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100,"
        " str reduction='mean', float label_smoothing=0.0, *, float z_loss=0.0,"
        " float? softcap=None, float? scale=None, bool grad_in_forward=False,"
        " ScalarType? dtype=None) -> Tensor",
        pure);
  m.def("linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *,"
        " Tensor? linear_bias=None, Tensor? weight=None, int ignore_index=-100,"
        " str reduction='mean', float label_smoothing=0.0, float z_loss=0.0,"
        " float? softcap=None, float? scale=None, ScalarType? dtype=None) -> Tensor",
        pure);
  m.def("cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index,"
        " int reduction, float[] how, ScalarType dtype, bool with_gradient)"
        " -> (Tensor loss, Tensor lse, Tensor total, Tensor dinput)",
        pure);
  m.def("cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight,"
        " Tensor lse, Tensor total, int ignore_index, int reduction, float[] how) -> Tensor",
        pure);
  m.def("linear_cross_entropy_forward(Tensor input, Tensor linear_weight, Tensor target,"
        " Tensor? linear_bias, Tensor? weight, int ignore_index, int reduction, float[] how,"
        " ScalarType dtype, bool[3] gradients) -> (Tensor loss, Tensor lse, Tensor total,"
        " Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
        pure);
  m.def("linear_cross_entropy_backward(Tensor grad, Tensor input, Tensor linear_weight,"
        " Tensor target, Tensor? linear_bias, Tensor? weight, Tensor lse, Tensor total,"
        " int ignore_index, int reduction, float[] how, bool[3] output_mask)"
        " -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
        pure);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", cross_entropy);
}

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) { m.impl("cross_entropy", cross_entropy); }

TORCH_LIBRARY_IMPL(fusedops, AutocastCPU, m) { m.impl("cross_entropy", cross_entropy_autocast); }

TORCH_LIBRARY_IMPL(fusedops, AutocastCUDA, m) { m.impl("cross_entropy", cross_entropy_autocast); }

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("cross_entropy_forward", cross_entropy_composite);
  m.impl("cross_entropy_backward", cross_entropy_backward_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("cross_entropy_forward", cross_entropy_outputs);
  m.impl("cross_entropy_backward", cross_entropy_backward_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("cross_entropy_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
