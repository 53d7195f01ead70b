// The losses and log-probabilities by their definition, fusedops/references/cross_entropy.py.

#include "csrc/ops/reference.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <vector>

#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops::cross_entropy {
namespace {

using Number = std::optional<double>;
using Dtype = std::optional<c10::ScalarType>;

Number softcap(const LogitMap& map) { return map.softcap == 0 ? Number() : map.softcap; }
Number scale(const LogitMap& map) { return map.scale == 1 ? Number() : map.scale; }

// The arguments of fusedops::cross_entropy_reference and fusedops::linear_cross_entropy_reference.
template <class Inputs>
struct LossDefinition {
  Inputs in;
  int64_t ignore_index;
  Reduction reduction;
  double label_smoothing, z_loss;
  Number softcap, scale;
  Dtype dtype;

  LossDefinition(const Inputs& in, const CrossEntropyOptions& options, Dtype dtype)
      : in(in),
        ignore_index(options.ignore_index),
        reduction(static_cast<Reduction>(options.reduction)),
        label_smoothing(options.label_smoothing),
        z_loss(options.z_loss),
        softcap(cross_entropy::softcap(options.map)),
        scale(cross_entropy::scale(options.map)),
        dtype(dtype) {}

  static auto fields(auto& a) {
    return std::tie(a.in, a.ignore_index, a.reduction, a.label_smoothing, a.z_loss, a.softcap,
                    a.scale, a.dtype);
  }
};

struct SumsDefinition {
  LossInputs in;
  int64_t ignore_index;
  Number softcap, scale;

  static auto fields(auto& a) { return std::tie(a.in, a.ignore_index, a.softcap, a.scale); }
};

struct LogProbsDefinition {
  LogProbInputs in;
  int64_t ignore_index;
  Number softcap, scale;
  std::array<bool, 2> optional_outputs;
  Dtype dtype;

  static auto fields(auto& a) {
    auto& [entropy, top1] = a.optional_outputs;
    return std::tie(a.in, a.ignore_index, a.softcap, a.scale, entropy, top1, a.dtype);
  }
};

// lse and total, which a kernel saves for the backward.
std::tuple<Tensor, Tensor> sums(const LossInputs& in, int64_t ignore_index, const LogitMap& map) {
  return call<"fusedops::cross_entropy_sums_reference", std::tuple<Tensor, Tensor>>(
      SumsDefinition{in, ignore_index, softcap(map), scale(map)});
}

// The gradient of rows, zeros for an ignored one: its logits may be NaN.
Tensor zero_ignored(const Tensor& gradient, const Tensor& target, int64_t ignore_index) {
  if (!gradient.defined()) return gradient;
  return at::where((target != ignore_index).unsqueeze(-1), gradient, 0);
}

// Gradients arrive in the results' dtype, so a definition to differentiate has wide results.
c10::ScalarType wide(const Tensor& input) { return accumulation_dtype(input.scalar_type()); }

}  // namespace

Tensor cross_entropy_reference(const LossInputs& in, const CrossEntropyOptions& options,
                               Dtype dtype) {
  return call<"fusedops::cross_entropy_reference", Tensor>(LossDefinition(in, options, dtype));
}

Tensor linear_cross_entropy_reference(const LinearLossInputs& in,
                                      const CrossEntropyOptions& options, Dtype dtype) {
  return call<"fusedops::linear_cross_entropy_reference", Tensor>(
      LossDefinition(in, options, dtype));
}

LogProbs linear_log_probs_reference(const LogProbInputs& in, const LogProbOptions& options,
                                    Dtype dtype, std::array<bool, 2> optional_outputs) {
  return call<"fusedops::linear_log_probs_reference", LogProbs>(
      LogProbsDefinition{in, options.ignore_index, softcap(options.map), scale(options.map),
                         optional_outputs, dtype});
}

Tensor cross_entropy_gradient(const Tensor& grad, const LossInputs& in,
                              const CrossEntropyOptions& options) {
  const auto definition = [&](const std::array<Tensor, 1>& inputs) -> variable_list {
    return {cross_entropy_reference({inputs[0], in.target, in.weight}, options, wide(in.input))};
  };
  const auto [dinput] = gradients_of<1>(definition, {in.input}, {true}, {grad});
  return zero_ignored(dinput, in.target, options.ignore_index);
}

LinearGradients linear_cross_entropy_gradients(const Tensor& grad, const LinearLossInputs& in,
                                               const CrossEntropyOptions& options,
                                               std::array<bool, 3> output_mask) {
  if (output_mask == std::array<bool, 3>{}) return {};
  const auto definition = [&](const std::array<Tensor, 3>& inputs) -> variable_list {
    const auto bias = optional(inputs[2]);
    return {linear_cross_entropy_reference({inputs[0], inputs[1], in.target, bias, in.weight},
                                           options, wide(in.input))};
  };
  const auto [dinput, dlinear_weight, dlinear_bias] =
      gradients_of<3>(definition, {in.input, in.linear_weight, value_or_undefined(in.linear_bias)},
                      output_mask, {grad});
  return {zero_ignored(dinput, in.target, options.ignore_index), dlinear_weight, dlinear_bias};
}

LinearGradients linear_log_probs_gradients(const OptionalTensor& grad_log_probs,
                                           const OptionalTensor& grad_entropy,
                                           const LogProbInputs& in, const LogProbOptions& options,
                                           std::array<bool, 3> output_mask) {
  if (output_mask == std::array<bool, 3>{}) return {};
  const auto definition = [&](const std::array<Tensor, 3>& inputs) -> variable_list {
    const auto bias = optional(inputs[2]);
    const auto [log_probs, entropy, top1] =
        linear_log_probs_reference({inputs[0], inputs[1], in.target, bias}, options, wide(in.input),
                                   {is_defined(grad_entropy), false});
    return {log_probs, entropy};
  };
  const auto [dinput, dlinear_weight, dlinear_bias] =
      gradients_of<3>(definition, {in.input, in.linear_weight, value_or_undefined(in.linear_bias)},
                      output_mask,
                      {value_or_undefined(grad_log_probs), value_or_undefined(grad_entropy)});
  return {zero_ignored(dinput, in.target, options.ignore_index), dlinear_weight, dlinear_bias};
}

Loss cross_entropy_forward_reference(const LossArguments& a) {
  cross_entropy_outputs(a);
  const CrossEntropyOptions options(a.numbers);
  const auto loss = cross_entropy_reference(a.in, options, a.dtype);
  const auto [lse, total] = sums(a.in, options.ignore_index, options.map);
  Tensor dinput;
  if (a.with_gradient) dinput = cross_entropy_gradient(at::ones_like(loss), a.in, options);
  return contiguous(Loss{loss, lse, total, dinput});
}

Tensor cross_entropy_backward_reference(const LossBackwardArguments& a) {
  cross_entropy_backward_outputs(a);
  return cross_entropy_gradient(a.grad, a.in, CrossEntropyOptions(a.numbers)).contiguous();
}

LinearLoss linear_cross_entropy_forward_reference(const LinearLossArguments& a) {
  linear_cross_entropy_outputs(a);
  const CrossEntropyOptions options(a.numbers);
  const auto loss = linear_cross_entropy_reference(a.in, options, a.dtype);
  const auto logits = at::linear(a.in.input, a.in.linear_weight, a.in.linear_bias);
  const auto [lse, total] =
      sums({logits, a.in.target, a.in.weight}, options.ignore_index, options.map);
  const auto [dinput, dlinear_weight, dlinear_bias] =
      linear_cross_entropy_gradients(at::ones_like(loss), a.in, options, a.gradients);
  return contiguous(LinearLoss{loss, lse, total, dinput, dlinear_weight, dlinear_bias});
}

LinearGradients linear_cross_entropy_backward_reference(const LinearLossBackwardArguments& a) {
  linear_cross_entropy_backward_outputs(a);
  return contiguous(
      linear_cross_entropy_gradients(a.grad, a.in, CrossEntropyOptions(a.numbers), a.output_mask));
}

LogProbsAndSums linear_log_probs_forward_reference(const LogProbArguments& a) {
  linear_log_probs_outputs(a);
  const auto options = a.numbers.options();
  const auto [log_probs, entropy, top1] =
      linear_log_probs_reference(a.in, options, wide(a.in.input), a.optional_outputs);
  const auto logits = at::linear(a.in.input, a.in.linear_weight, a.in.linear_bias);
  const auto [lse, total] =
      sums({logits, a.in.target, std::nullopt}, options.ignore_index, options.map);
  if (!entropy.defined()) return {log_probs.to(a.dtype), entropy, top1, lse, Tensor()};
  return {log_probs.to(a.dtype), entropy.to(a.dtype), top1, lse, lse - entropy};
}

LinearGradients linear_log_probs_backward_reference(const LogProbBackwardArguments& a) {
  linear_log_probs_backward_outputs(a);
  return contiguous(linear_log_probs_gradients(a.grad_log_probs, a.grad_entropy, a.in,
                                               a.numbers.options(), a.output_mask));
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("cross_entropy_reference(Tensor input, Tensor target, Tensor? weight, int ignore_index,"
        " str reduction, float label_smoothing, float z_loss, float? softcap, float? scale,"
        " ScalarType? dtype) -> Tensor",
        pure);
  m.def("linear_cross_entropy_reference(Tensor input, Tensor linear_weight, Tensor target,"
        " Tensor? linear_bias, Tensor? weight, int ignore_index, str reduction,"
        " float label_smoothing, float z_loss, float? softcap, float? scale, ScalarType? dtype)"
        " -> Tensor",
        pure);
  m.def("cross_entropy_sums_reference(Tensor input, Tensor target, Tensor? weight,"
        " int ignore_index, float? softcap, float? scale) -> (Tensor lse, Tensor total)",
        pure);
  m.def("linear_log_probs_reference(Tensor input, Tensor linear_weight, Tensor target,"
        " Tensor? linear_bias, int ignore_index, float? softcap, float? scale,"
        " bool return_entropy, bool return_top1, ScalarType? dtype)"
        " -> (Tensor log_probs, Tensor entropy, Tensor top1)",
        pure);
}

}  // namespace fusedops::cross_entropy
