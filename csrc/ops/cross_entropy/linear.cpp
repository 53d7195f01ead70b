// linear_cross_entropy's public operator: autograd, and the choice between kernels and the
// definition.

#include <ATen/Functions.h>

#include "csrc/ops/autograd.h"
#include "csrc/ops/cross_entropy/operators.h"
#include "csrc/ops/cross_entropy/scaled.h"

namespace fusedops::cross_entropy {
namespace {

LinearLoss forward(const LinearLossInputs& in, const CrossEntropyOptions& options,
                   c10::ScalarType dtype, std::array<bool, 3> gradients) {
  return below_autograd([&] {
    return call<"fusedops::linear_cross_entropy_forward", LinearLoss>(LinearLossArguments{
        in, {options.ignore_index, options.reduction, options.scalars()}, dtype, gradients});
  });
}

// Saves no logits: either the forward has computed the gradients, or the backward recomputes the
// logits.
struct LinearCrossEntropyNode {
  static constexpr const char* kName = "FusedLinearCrossEntropyBackward";
  static constexpr size_t kInputs = 3;  // input, linear_weight, linear_bias
  enum : size_t { kInput, kLinearWeight, kLinearBias, kTarget, kWeight, kLse, kTotal, kGradients };
  static constexpr size_t kSaved = kGradients + kInputs;  // from kGradients: the inputs' gradients

  CrossEntropyOptions options;
  bool saves_gradients;

  static auto fields(auto& a) { return std::tie(a.options, a.saves_gradients); }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 3> needs_grad) const {
    variable_list input_gradients(kInputs);
    if (!grads[0].defined()) return input_gradients;
    if (!saves_gradients || at::GradMode::is_enabled()) {
      const auto [dinput, dlinear_weight, dlinear_bias] = gradients(saved, grads[0], needs_grad);
      return {dinput, dlinear_weight, dlinear_bias};
    }
    for (size_t i = 0; i < kInputs; ++i) {
      if (needs_grad[i]) input_gradients[i] = scaled_gradient(saved[kGradients + i], grads[0]);
    }
    return input_gradients;
  }

  LinearGradients gradients(const Saved& saved, const Tensor& grad,
                            std::array<bool, 3> needs_grad) const {
    const auto input = saved[kInput], linear_weight = saved[kLinearWeight];
    const auto target = saved[kTarget];
    const auto linear_bias = optional(saved[kLinearBias]), weight = optional(saved[kWeight]);
    const LinearLossInputs in{input, linear_weight, target, linear_bias, weight};
    if (at::GradMode::is_enabled()) {  // double backward: of the definition
      return linear_cross_entropy_gradients(grad, in, options, needs_grad);
    }
    return call<"fusedops::linear_cross_entropy_backward", LinearGradients>(
        LinearLossBackwardArguments{grad,
                                    in,
                                    saved[kLse],
                                    saved[kTotal],
                                    {options.ignore_index, options.reduction, options.scalars()},
                                    needs_grad});
  }
};

// Whether the forward computes the gradients. It sums the weight's over pieces of the rows in
// float32, in the gradient itself if the weight is float32. With "none" it would have to know each
// row's loss gradient.
bool makes_gradients(const Tensor& linear_weight, const CrossEntropyOptions& options) {
  const auto dtype = linear_weight.scalar_type();
  const bool in_place = dtype == at::kFloat;
  return !options.is(Reduction::none) && may_make_gradient(dtype) &&
         (in_place || !linear_weight.requires_grad());
}

Tensor with_gradient(const LinearLossInputs& in, const CrossEntropyOptions& options,
                     c10::ScalarType dtype) {
  const auto bias = value_or_undefined(in.linear_bias);
  const auto node = node_of<FusedNode<LinearCrossEntropyNode>>(in.input, in.linear_weight, bias);
  const bool saves_gradients = makes_gradients(in.linear_weight, options);
  node->backward = {options, saves_gradients};
  const auto makes_gradient = [&](const Tensor& t) {
    return saves_gradients && needs_gradient({t});
  };
  const std::array<bool, 3> gradients{makes_gradient(in.input), makes_gradient(in.linear_weight),
                                      makes_gradient(bias)};
  const auto [loss, lse, total, dinput, dlinear_weight, dlinear_bias] =
      forward(in, options, dtype, gradients);
  torch::autograd::set_history(loss, node);
  node->saved = {saved(in.input),    saved(in.linear_weight), saved(bias),
                 saved(in.target),   saved(in.weight),        saved(lse),
                 saved(total),       saved(dinput),           saved(dlinear_weight),
                 saved(dlinear_bias)};
  return loss;
}

bool has_kernel(const LinearLossInputs& in) {
  return in.linear_weight.dim() == 2 && in.target.scalar_type() == at::kLong &&
         !needs_composite({in.input, in.linear_weight, in.linear_bias, in.weight}) &&
         !needs_gradient({in.weight});
}

}  // namespace

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const OptionalTensor& linear_bias, const OptionalTensor& weight,
                            int64_t ignore_index, std::string_view reduction,
                            double label_smoothing, double z_loss, std::optional<double> softcap,
                            std::optional<double> scale, std::optional<c10::ScalarType> dtype) {
  const CrossEntropyOptions options("linear_cross_entropy", ignore_index, reduction,
                                    label_smoothing, z_loss, softcap, scale);
  const LinearLossInputs in{input, linear_weight, target, linear_bias, weight};
  linear_cross_entropy_check("linear_cross_entropy", in, dtype);
  if (!has_kernel(in)) return linear_cross_entropy_reference(in, options, dtype);
  const auto rows = as_matrix(input);
  const auto targets = as_vector(target);
  const auto to = dtype.value_or(input.scalar_type());
  const LinearLossInputs row_inputs{rows, linear_weight, targets, linear_bias, weight};
  const auto loss = needs_gradient({rows, linear_weight, linear_bias})
                        ? with_gradient(row_inputs, options, to)
                        : std::get<0>(forward(row_inputs, options, to, {}));
  return options.is(Reduction::none) ? loss.view_symint(target.sym_sizes()) : loss;
}

}  // namespace fusedops::cross_entropy
