// Checks of the arguments, and the outputs that the kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops {
namespace {

// Targets have the shape of the logits without their classes: [], [N] or [N, ...].
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
  if (!given(t)) return;
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

}  // namespace

void cross_entropy_check(const char* op, const Tensor& input, c10::SymIntArrayRef logits,
                         const Tensor& target, const OptionalTensor& weight,
                         std::optional<c10::ScalarType> dtype) {
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

void linear_cross_entropy_check(const Tensor& input, const Tensor& linear_weight,
                                const Tensor& target, const OptionalTensor& linear_bias,
                                const OptionalTensor& weight,
                                std::optional<c10::ScalarType> dtype) {
  constexpr const char* op = "linear_cross_entropy";
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
              ": input must be [N, features] beside linear_weight ", describe(linear_weight),
              ", got ", describe(input));
  if (given(linear_bias)) {
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
    return cross_entropy_check(op, input, logits, target, weight, dtype);
  }
  TORCH_CHECK(target.sym_sizes().equals(rows), op, ": target must be int64 ", rows,
              " like the rows of input, ", describe(input), ", got ", describe(target));
  const std::array<c10::SymInt, 2> logits{target.sym_numel(), classes[0]};
  cross_entropy_check(op, input, logits, as_vector(target), weight, dtype);
}

Loss cross_entropy_outputs(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                           int64_t, int64_t reduction, Numbers, c10::ScalarType dtype,
                           bool with_gradient) {
  TORCH_CHECK(input.dim() == 2, "cross_entropy_forward: input must be rows, got ", describe(input));
  cross_entropy_check("cross_entropy", input, input.sym_sizes(), target, weight, dtype);
  return {empty_loss(target, reduction, dtype), empty_lse(target), empty_total(target),
          with_gradient ? empty_contiguous(input) : Tensor()};
}

Tensor cross_entropy_backward_outputs(const Tensor& grad, const Tensor& input, const Tensor& target,
                                      const OptionalTensor& weight, const Tensor&, const Tensor&,
                                      int64_t, int64_t reduction, Numbers) {
  check_grad("cross_entropy_backward", grad, target, reduction);
  cross_entropy_check("cross_entropy", input, input.sym_sizes(), target, weight, std::nullopt);
  return empty_contiguous(input);
}

LinearLoss linear_cross_entropy_outputs(const Tensor& input, const Tensor& linear_weight,
                                        const Tensor& target, const OptionalTensor& linear_bias,
                                        const OptionalTensor& weight, int64_t, int64_t reduction,
                                        Numbers, c10::ScalarType dtype,
                                        std::array<bool, 3> gradients) {
  TORCH_CHECK(input.dim() == 2 && linear_weight.dim() == 2,
              "linear_cross_entropy_forward: input must be rows, got ", describe(input));
  linear_cross_entropy_check(input, linear_weight, target, linear_bias, weight, dtype);
  const auto of = [&](bool wanted, const OptionalTensor& t) {
    return wanted && given(t) ? empty_contiguous(*t) : Tensor();
  };
  return {empty_loss(target, reduction, dtype),
          empty_lse(target),
          empty_total(target),
          of(gradients[0], input),
          of(gradients[1], linear_weight),
          of(gradients[2], linear_bias)};
}

LinearGradients linear_cross_entropy_backward_outputs(
    const Tensor& grad, const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const OptionalTensor& linear_bias, const OptionalTensor& weight, const Tensor&, const Tensor&,
    int64_t, int64_t reduction, Numbers, std::array<bool, 3> output_mask) {
  check_grad("linear_cross_entropy_backward", grad, target, reduction);
  linear_cross_entropy_check(input, linear_weight, target, linear_bias, weight, std::nullopt);
  const auto of = [](bool wanted, const OptionalTensor& t) {
    return wanted && given(t) ? empty_contiguous(*t) : Tensor();
  };
  return {of(output_mask[0], input), of(output_mask[1], linear_weight),
          of(output_mask[2], linear_bias)};
}

}  // namespace fusedops
