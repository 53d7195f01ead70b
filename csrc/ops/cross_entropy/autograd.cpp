// cross_entropy's autograd, and its choice between kernels and the definition. Also the schemas and
// autocast rules of cross_entropy, linear_cross_entropy and linear_log_probs.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <cmath>

#include "csrc/ops/autograd.h"
#include "csrc/ops/cross_entropy/operators.h"
#include "csrc/ops/cross_entropy/scaled.h"

namespace fusedops::cross_entropy {
namespace {

Loss forward(const LossInputs& in, const CrossEntropyOptions& options, c10::ScalarType dtype,
             bool with_gradient) {
  return below_autograd([&] {
    return call<"fusedops::cross_entropy_forward", Loss>(LossArguments{
        in, {options.ignore_index, options.reduction, options.scalars()}, dtype, with_gradient});
  });
}

// Saves the logits, or the gradient that the forward has computed.
struct CrossEntropyNode {
  static constexpr const char* kName = "FusedCrossEntropyBackward";
  static constexpr size_t kInputs = 1;
  enum : size_t { kInput, kTarget, kWeight, kLse, kTotal, kSaved };

  CrossEntropyOptions options;
  bool saves_gradient;  // whether the saved input is the gradient

  static auto fields(auto& a) { return std::tie(a.options, a.saves_gradient); }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 1>) const {
    if (!grads[0].defined()) return variable_list(1);
    return {gradient(saved, grads[0])};
  }

  Tensor gradient(const Saved& saved, const Tensor& grad) const {
    if (saves_gradient) {
      TORCH_CHECK(!at::GradMode::is_enabled(),
                  "cross_entropy: grad_in_forward=True keeps no logits, so it has no double "
                  "backward");
      return scaled_gradient(saved[kInput], grad);
    }
    const auto input = saved[kInput], target = saved[kTarget];
    const auto weight = optional(saved[kWeight]);
    const LossInputs in{input, target, weight};
    if (at::GradMode::is_enabled()) {  // double backward: of the definition
      return cross_entropy_gradient(grad, in, options);
    }
    return call<"fusedops::cross_entropy_backward", Tensor>(
        LossBackwardArguments{grad,
                              in,
                              saved[kLse],
                              saved[kTotal],
                              {options.ignore_index, options.reduction, options.scalars()}});
  }
};

Tensor with_gradient(const LossInputs& in, const CrossEntropyOptions& options,
                     c10::ScalarType dtype, bool grad_in_forward) {
  const bool saves_gradient = grad_in_forward && may_make_gradient(in.input.scalar_type());
  const auto node = node_of<FusedNode<CrossEntropyNode>>(in.input);
  const auto [loss, lse, total, dinput] = forward(in, options, dtype, saves_gradient);
  torch::autograd::set_history(loss, node);
  node->backward = {options, saves_gradient};
  if (saves_gradient) {
    node->saved[CrossEntropyNode::kInput] = saved(dinput);
  } else {
    node->saved = {saved(in.input), saved(in.target), saved(in.weight), saved(lse), saved(total)};
  }
  return loss;
}

// Whether the kernels take the call: rows of logits and class indices.
bool has_kernel(const Tensor& input, const Tensor& target, const OptionalTensor& weight) {
  return input.dim() == 2 && (input.sym_stride(1) == 1 || input.sym_size(1) == 1) &&
         target.scalar_type() == at::kLong && !needs_composite({input, weight}) &&
         !needs_gradient({weight});
}

// [N, C, ...] as rows, if a row's classes are adjacent in memory.
Tensor classes_last(const Tensor& input) {
  if (input.dim() == 1) return input.unsqueeze(0);
  if (input.dim() == 2) return input;
  const auto last = input.movedim(1, -1);
  if (last.sym_stride(-1) != 1 || input.scalar_type() == at::kDouble) return input;
  return last.flatten(0, -2);
}

// Autocast rule: the loss is at least float32.
struct WideLoss {
  template <class Arguments>
  static void apply(Arguments& args, c10::ScalarType, c10::DeviceType) {
    auto& dtype = std::get<std::optional<c10::ScalarType>>(args);
    dtype = dtype.value_or(accumulation_dtype(std::get<0>(args).scalar_type()));
  }
};

// Casts as for F.linear, and makes the loss float32 or more.
struct WideLossOfProduct {
  template <class Arguments>
  static void apply(Arguments& args, c10::ScalarType to, c10::DeviceType device) {
    Casts<0, 1, 3>::apply(args, to, device);
    WideLoss::apply(args, to, device);
  }
};

}  // namespace

CrossEntropyOptions::CrossEntropyOptions(const char* op, int64_t ignore_index,
                                         std::string_view reduction, double label_smoothing,
                                         double z_loss, std::optional<double> softcap,
                                         std::optional<double> scale)
    : ignore_index(ignore_index),
      reduction(static_cast<int64_t>(from_name<Reduction>(op, reduction))),
      label_smoothing(label_smoothing),
      z_loss(z_loss),
      map{scale.value_or(1), softcap.value_or(0)} {
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
  const LossInputs in{input, target, weight};
  cross_entropy_check("cross_entropy", in, input.sym_sizes(), dtype);
  const bool indices = target.scalar_type() == at::kLong;
  const auto rows = indices ? classes_last(input) : input;
  if (!indices || rows.dim() != 2 || !has_kernel(rows, target, weight)) {
    return cross_entropy_reference(in, options, dtype);
  }
  const auto targets = as_vector(target);
  const LossInputs row_inputs{rows, targets, weight};
  const auto to = dtype.value_or(input.scalar_type());
  const auto loss = needs_gradient({rows}) ? with_gradient(row_inputs, options, to, grad_in_forward)
                                           : std::get<0>(forward(row_inputs, options, to, false));
  return options.is(Reduction::none) ? loss.view_symint(target.sym_sizes()) : loss;
}

const Operators operators([](Operators& o) {
  o.add_public<cross_entropy, WideLoss>(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100,"
      " str reduction='mean', float label_smoothing=0.0, *, float z_loss=0.0,"
      " float? softcap=None, float? scale=None, bool grad_in_forward=False,"
      " ScalarType? dtype=None) -> Tensor");
  o.add_public<linear_cross_entropy, WideLossOfProduct>(
      "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *,"
      " Tensor? linear_bias=None, Tensor? weight=None, int ignore_index=-100,"
      " str reduction='mean', float label_smoothing=0.0, float z_loss=0.0,"
      " float? softcap=None, float? scale=None, ScalarType? dtype=None) -> Tensor");
  o.add_public<linear_log_probs, WideLossOfProduct>(
      "linear_log_probs(Tensor input, Tensor linear_weight, Tensor target, *,"
      " Tensor? linear_bias=None, int ignore_index=-100, float? softcap=None, float? scale=None,"
      " float temperature=1.0, bool return_entropy=False, bool return_top1=False,"
      " ScalarType? dtype=None) -> (Tensor log_probs, Tensor entropy, Tensor top1)");
  o.add_kernel("cross_entropy_forward(Tensor input, Tensor target, Tensor? weight,"
               " int ignore_index, int reduction, float[] scalars, ScalarType dtype,"
               " bool with_gradient) -> (Tensor loss, Tensor lse, Tensor total, Tensor dinput)",
               flat<cross_entropy_outputs>, flat<cross_entropy_forward_reference>);
  o.add_kernel(
      "cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight,"
      " Tensor lse, Tensor total, int ignore_index, int reduction, float[] scalars) -> Tensor",
      flat<cross_entropy_backward_outputs>, flat<cross_entropy_backward_reference>);
  o.add_kernel("linear_cross_entropy_forward(Tensor input, Tensor linear_weight, Tensor target,"
               " Tensor? linear_bias, Tensor? weight, int ignore_index, int reduction,"
               " float[] scalars, ScalarType dtype, bool[3] gradients) -> (Tensor loss, Tensor lse,"
               " Tensor total, Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
               flat<linear_cross_entropy_outputs>, flat<linear_cross_entropy_forward_reference>);
  o.add_kernel("linear_cross_entropy_backward(Tensor grad, Tensor input, Tensor linear_weight,"
               " Tensor target, Tensor? linear_bias, Tensor? weight, Tensor lse, Tensor total,"
               " int ignore_index, int reduction, float[] scalars, bool[3] output_mask)"
               " -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
               flat<linear_cross_entropy_backward_outputs>,
               flat<linear_cross_entropy_backward_reference>);
  o.add_kernel("linear_log_probs_forward(Tensor input, Tensor linear_weight, Tensor target,"
               " Tensor? linear_bias, int ignore_index, float[] scalars, ScalarType dtype,"
               " bool[2] wanted) -> (Tensor log_probs, Tensor entropy, Tensor top1, Tensor lse,"
               " Tensor mean)",
               flat<linear_log_probs_outputs>, flat<linear_log_probs_forward_reference>);
  o.add_kernel("linear_log_probs_backward(Tensor? grad_log_probs, Tensor? grad_entropy,"
               " Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias,"
               " Tensor lse, Tensor? mean, int ignore_index, float[] scalars, bool[3] output_mask)"
               " -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
               flat<linear_log_probs_backward_outputs>, flat<linear_log_probs_backward_reference>);
});

}  // namespace fusedops::cross_entropy
