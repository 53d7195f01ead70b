// linear_log_probs' public operator: autograd, and the choice between kernels and the definition.

#include <ATen/Functions.h>

#include <cmath>

#include "csrc/ops/autograd.h"
#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops::cross_entropy {
namespace {

LogProbsAndSums forward(const LogProbInputs& in, const LogProbOptions& options,
                        c10::ScalarType dtype, std::array<bool, 2> optional_outputs) {
  const std::array<double, 2> scalars{options.map.scale, options.map.softcap};
  return below_autograd([&] {
    return call<"fusedops::linear_log_probs_forward", LogProbsAndSums>(
        LogProbArguments{in, {options.ignore_index, scalars}, dtype, optional_outputs});
  });
}

// Saves no logits: the backward recomputes them.
struct LinearLogProbsNode {
  static constexpr const char* kName = "FusedLinearLogProbsBackward";
  static constexpr size_t kInputs = 3;  // input, linear_weight, linear_bias
  enum : size_t { kInput, kLinearWeight, kLinearBias, kTarget, kLse, kMean, kSaved };

  LogProbOptions options;

  static auto fields(auto& a) { return LogProbOptions::fields(a.options); }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 3> needs_grad) const {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(kInputs);
    const auto input = saved[kInput], linear_weight = saved[kLinearWeight];
    const auto target = saved[kTarget];
    const auto linear_bias = optional(saved[kLinearBias]), mean = optional(saved[kMean]);
    const auto grad_log_probs = optional(grads[0]), grad_entropy = optional(grads[1]);
    const LogProbInputs in{input, linear_weight, target, linear_bias};
    const auto [dinput, dlinear_weight, dlinear_bias] = [&] {
      if (at::GradMode::is_enabled()) {  // double backward: of the definition
        return linear_log_probs_gradients(grad_log_probs, grad_entropy, in, options, needs_grad);
      }
      const std::array<double, 2> scalars{options.map.scale, options.map.softcap};
      return call<"fusedops::linear_log_probs_backward", LinearGradients>(
          LogProbBackwardArguments{grad_log_probs,
                                   grad_entropy,
                                   in,
                                   saved[kLse],
                                   mean,
                                   {options.ignore_index, scalars},
                                   needs_grad});
    }();
    return {dinput, dlinear_weight, dlinear_bias};
  }
};

LogProbs with_gradient(const LogProbInputs& in, const LogProbOptions& options,
                       c10::ScalarType dtype, std::array<bool, 2> optional_outputs) {
  const auto bias = value_or_undefined(in.linear_bias);
  const auto node = node_of<FusedNode<LinearLogProbsNode>>(in.input, in.linear_weight, bias);
  const auto [log_probs, entropy, top1, lse, mean] = forward(in, options, dtype, optional_outputs);
  torch::autograd::set_history(variable_list{log_probs, entropy}, node);
  node->backward = {options};
  node->saved = {saved(in.input), saved(in.linear_weight),
                 saved(bias),     saved(in.target),
                 saved(lse),      saved(mean)};
  return {log_probs, entropy, top1};
}

bool has_kernel(const LogProbInputs& in) {
  return !needs_composite({in.input, in.linear_weight, in.linear_bias});
}

Tensor viewed(const Tensor& rows, const Tensor& target) {
  return rows.defined() ? rows.view_symint(target.sym_sizes()) : rows;
}

}  // namespace

CrossEntropyOptions LogProbOptions::loss_options() const {
  CrossEntropyOptions options{};
  options.ignore_index = ignore_index;
  options.reduction = static_cast<int64_t>(Reduction::none);
  options.map = map;
  return options;
}

LogProbs linear_log_probs(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                          const OptionalTensor& linear_bias, int64_t ignore_index,
                          std::optional<double> softcap, std::optional<double> scale,
                          double temperature, bool return_entropy, bool return_top1,
                          std::optional<c10::ScalarType> dtype) {
  TORCH_CHECK_VALUE(temperature > 0 && std::isfinite(temperature),
                    "linear_log_probs: temperature must be above 0 and finite, got ", temperature);
  TORCH_CHECK_VALUE(!softcap || (*softcap > 0 && std::isfinite(*softcap)),
                    "linear_log_probs: softcap must be above 0 and finite, got ",
                    softcap.value_or(0));
  // (softcap / T) tanh(scale / T x / (softcap / T)) is the capped logit over T.
  const LogProbOptions options{ignore_index,
                               {scale.value_or(1) / temperature,
                                softcap.value_or(0) / temperature}};
  const LogProbInputs in{input, linear_weight, target, linear_bias};
  linear_log_probs_check(in, dtype);
  const std::array<bool, 2> optional_outputs{return_entropy, return_top1};
  if (!has_kernel(in)) return linear_log_probs_reference(in, options, dtype, optional_outputs);
  const auto rows = as_matrix(input), targets = as_vector(target);
  const LogProbInputs row_inputs{rows, linear_weight, targets, linear_bias};
  const auto to = dtype.value_or(input.scalar_type());
  const auto [log_probs, entropy, top1] = [&]() -> LogProbs {
    if (needs_gradient({rows, linear_weight, linear_bias})) {
      return with_gradient(row_inputs, options, to, optional_outputs);
    }
    const auto [log_probs, entropy, top1, lse, mean] =
        forward(row_inputs, options, to, optional_outputs);
    return {log_probs, entropy, top1};
  }();
  return {viewed(log_probs, target), viewed(entropy, target), viewed(top1, target)};
}

}  // namespace fusedops::cross_entropy
