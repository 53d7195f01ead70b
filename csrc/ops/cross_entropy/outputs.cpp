// Checks the arguments of cross entropy and log-probabilities, and allocates the outputs that their
// kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/checks.h"
#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops::cross_entropy {
namespace {

// Returns the targets' shape, that of the logits without the classes: [], [N] or [N, ...].
std::vector<c10::SymInt> without_classes(c10::SymIntArrayRef logits) {
  auto shape = logits.vec();
  shape.erase(shape.begin() + (logits.size() > 1));
  return shape;
}

const c10::SymInt& classes(c10::SymIntArrayRef logits) { return logits[logits.size() > 1]; }

void check_target(const char* op, c10::SymIntArrayRef logits, const Tensor& target) {
  if (at::isFloatingType(target.scalar_type())) {
    TORCH_CHECK(target.sym_sizes().equals(logits), op, ": target must be probabilities ", logits,
                " like the logits, or int64 class indices, got ", describe(target));
    return;
  }
  const auto shape = without_classes(logits);
  const bool indices = target.scalar_type() == at::kLong || target.scalar_type() == at::kByte;
  TORCH_CHECK(indices && target.sym_sizes().equals(shape), op, ": target must be int64 ",
              c10::SymIntArrayRef(shape), " like the logits ", logits, ", got ", describe(target));
}

void check_class_vector(const char* op, const char* name, const OptionalTensor& t,
                        const c10::SymInt& n, const Tensor& input) {
  if (!is_defined(t)) return;
  check_floating(op, name, *t);
  check_same_device(op, name, *t, "input", input);
  TORCH_CHECK(t->dim() == 1 && t->sym_size(0) == n, op, ": ", name, " must be [", n,
              "], one number a class, got ", describe(*t));
}

Tensor empty_loss(const Tensor& target, int64_t reduction, c10::ScalarType dtype) {
  const auto options = target.options().dtype(dtype);
  if (reduction == static_cast<int64_t>(Reduction::none)) {
    return at::empty_symint(target.sym_sizes(), options);
  }
  return at::empty({}, options);
}

Tensor empty_lse(const Tensor& target) {
  return at::empty_symint(target.sym_sizes(), target.options().dtype(at::kDouble));
}

Tensor empty_total(const Tensor& target) {
  return at::empty({}, target.options().dtype(at::kDouble));
}

void check_grad(const char* op, const Tensor& grad, const Tensor& target, int64_t reduction) {
  check_floating(op, "grad", grad);
  const bool rows = reduction == static_cast<int64_t>(Reduction::none);
  TORCH_CHECK(rows ? grad.sym_sizes().equals(target.sym_sizes()) : grad.dim() == 0, op,
              ": grad must be of the loss, got ", describe(grad), " for targets ",
              describe(target));
}

LinearGradients empty_gradients(const LinearLossInputs& in, std::array<bool, 3> output_mask) {
  const auto like = [](bool needs_grad, const OptionalTensor& t) {
    return needs_grad && is_defined(t) ? empty_contiguous(*t) : Tensor();
  };
  return {like(output_mask[0], in.input), like(output_mask[1], in.linear_weight),
          like(output_mask[2], in.linear_bias)};
}

}  // namespace

void cross_entropy_check(const char* op, const LossInputs& in, c10::SymIntArrayRef logits,
                         std::optional<c10::ScalarType> dtype) {
  const auto& [input, target, weight] = in;
  check_floating(op, "input", input);
  TORCH_CHECK(logits.size() > 0, op, ": input must have a dimension of classes, got ",
              describe(input));
  check_target(op, logits, target);
  check_same_device(op, "target", target, "input", input);
  check_class_vector(op, "weight", weight, classes(logits), input);
  TORCH_CHECK(!dtype || *dtype == input.scalar_type() || *dtype == at::kFloat, op,
              ": dtype must be float32 or input's, ", c10::getDtypeNames(input.scalar_type()).first,
              ", got ", c10::getDtypeNames(*dtype).first);
}

void linear_cross_entropy_check(const char* op, const LinearLossInputs& in,
                                std::optional<c10::ScalarType> dtype) {
  const auto& [input, linear_weight, target, linear_bias, weight] = in;
  check_floating(op, "input", input);
  check_floating(op, "linear_weight", linear_weight);
  check_same_device(op, "linear_weight", linear_weight, "input", input);
  TORCH_CHECK(linear_weight.dim() > 1, op,
              ": linear_weight must be [classes, features] or [classes, ..., features], got ",
              describe(linear_weight));
  TORCH_CHECK(input.dim() > 0 && input.sym_size(-1) == linear_weight.sym_size(-1) &&
                  input.scalar_type() == linear_weight.scalar_type(),
              op, ": linear_weight must have input's dtype and last dimension, ", describe(input),
              ", got ", describe(linear_weight));
  const auto classes = linear_weight.sym_sizes().slice(0, linear_weight.dim() - 1);
  TORCH_CHECK(classes.size() == 1 || input.dim() == 2, op,
              ": input must be [N, features] for linear_weight ", describe(linear_weight), ", got ",
              describe(input));
  if (is_defined(linear_bias)) {
    check_same_device(op, "linear_bias", *linear_bias, "input", input);
    TORCH_CHECK(linear_bias->scalar_type() == input.scalar_type() &&
                    linear_bias->sym_sizes().equals(classes),
                op, ": linear_bias must be ", describe(input.scalar_type(), classes),
                " like input and linear_weight's classes, got ", describe(*linear_bias));
  }
  const auto rows = input.sym_sizes().slice(0, input.dim() - 1);
  const bool in_rows = classes.size() == 1 && !at::isFloatingType(target.scalar_type());
  if (!in_rows) {
    std::vector<c10::SymInt> logits = rows.vec();
    logits.insert(logits.end(), classes.begin(), classes.end());
    return cross_entropy_check(op, {input, target, weight}, logits, dtype);
  }
  TORCH_CHECK(target.sym_sizes().equals(rows), op, ": target must be int64 ", rows,
              " like the rows of input, ", describe(input), ", got ", describe(target));
  const std::array<c10::SymInt, 2> logits{target.sym_numel(), classes[0]};
  cross_entropy_check(op, {input, as_vector(target), weight}, logits, dtype);
}

void linear_log_probs_check(const LogProbInputs& in, std::optional<c10::ScalarType> dtype) {
  constexpr const char* op = "linear_log_probs";
  TORCH_CHECK(in.linear_weight.dim() == 2, op, ": linear_weight must be [classes, features], got ",
              describe(in.linear_weight));
  TORCH_CHECK(in.target.scalar_type() == at::kLong, op, ": target must be int64, got ",
              describe(in.target));
  linear_cross_entropy_check(op, in.loss_inputs(), dtype);
}

Loss cross_entropy_outputs(const LossArguments& a) {
  const auto& [input, target, weight] = a.in;
  TORCH_CHECK(input.dim() == 2, "cross_entropy_forward: input must be rows, got ", describe(input));
  cross_entropy_check("cross_entropy", a.in, input.sym_sizes(), a.dtype);
  return {empty_loss(target, a.numbers.reduction, a.dtype), empty_lse(target), empty_total(target),
          a.with_gradient ? empty_contiguous(input) : Tensor()};
}

Tensor cross_entropy_backward_outputs(const LossBackwardArguments& a) {
  check_grad("cross_entropy_backward", a.grad, a.in.target, a.numbers.reduction);
  cross_entropy_check("cross_entropy", a.in, a.in.input.sym_sizes(), std::nullopt);
  return empty_contiguous(a.in.input);
}

LinearLoss linear_cross_entropy_outputs(const LinearLossArguments& a) {
  const auto& [input, linear_weight, target, linear_bias, weight] = a.in;
  TORCH_CHECK(input.dim() == 2 && linear_weight.dim() == 2,
              "linear_cross_entropy_forward: input must be rows, got ", describe(input));
  linear_cross_entropy_check("linear_cross_entropy", a.in, a.dtype);
  const auto [dinput, dlinear_weight, dlinear_bias] = empty_gradients(a.in, a.gradients);
  return {empty_loss(target, a.numbers.reduction, a.dtype),
          empty_lse(target),
          empty_total(target),
          dinput,
          dlinear_weight,
          dlinear_bias};
}

LogProbsAndSums linear_log_probs_outputs(const LogProbArguments& a) {
  const auto& [input, linear_weight, target, linear_bias] = a.in;
  TORCH_CHECK(input.dim() == 2, "linear_log_probs_forward: input must be rows, got ",
              describe(input));
  linear_log_probs_check(a.in, a.dtype);
  const auto none = static_cast<int64_t>(Reduction::none);
  const auto [entropy, top1] = a.optional_outputs;
  return {empty_loss(target, none, a.dtype), entropy ? empty_loss(target, none, a.dtype) : Tensor(),
          top1 ? empty_loss(target, none, at::kBool) : Tensor(), empty_lse(target),
          entropy ? empty_lse(target) : Tensor()};
}

LinearGradients linear_log_probs_backward_outputs(const LogProbBackwardArguments& a) {
  for (const auto* grad : {&a.grad_log_probs, &a.grad_entropy}) {
    if (!is_defined(*grad)) continue;
    check_grad("linear_log_probs_backward", **grad, a.in.target,
               static_cast<int64_t>(Reduction::none));
  }
  TORCH_CHECK(!is_defined(a.grad_entropy) || is_defined(a.mean),
              "linear_log_probs_backward: grad_entropy needs mean");
  linear_log_probs_check(a.in, std::nullopt);
  return empty_gradients(a.in.loss_inputs(), a.output_mask);
}

LinearGradients linear_cross_entropy_backward_outputs(const LinearLossBackwardArguments& a) {
  check_grad("linear_cross_entropy_backward", a.grad, a.in.target, a.numbers.reduction);
  linear_cross_entropy_check("linear_cross_entropy", a.in, std::nullopt);
  return empty_gradients(a.in, a.output_mask);
}

}  // namespace fusedops::cross_entropy
