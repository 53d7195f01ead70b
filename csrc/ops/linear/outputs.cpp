// Checks linear's arguments and allocates the outputs that its kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/checks.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::linear {
namespace {

constexpr const char* kForward = "linear_forward";
constexpr const char* kBackward = "linear_backward";

}  // namespace

bool is_transposed(const OptionalTensor& weight) {
  return is_defined(weight) && weight->dim() == 2 && !weight->is_contiguous() &&
         weight->t().is_contiguous();
}

void linear_check(const LinearArguments& a) {
  const auto &input = a.input, &weight = a.weight;
  check_floating(kForward, "input", input);
  TORCH_CHECK(input.dim() > 0, kForward, ": input must have a dimension, got ", describe(input));
  check_like(kForward, "weight", weight, "input", input);
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == input.sym_size(-1), kForward,
              ": weight must have shape [N, ", input.sym_size(-1), "] for input ",
              input.sym_sizes(), ", got ", describe(weight));
  if (is_defined(a.bias)) {
    check_like(kForward, "bias", *a.bias, "input", input);
    check_shape(kForward, "bias", *a.bias, {weight.sym_size(0)});
  }
}

LinearForward linear_outputs(const LinearArguments& a) {
  linear_check(a);
  const auto shape = with_last(a.input, a.weight.sym_size(0));
  const auto make = [&] { return at::empty_symint(shape, a.input.options()); };
  return {make(), a.keeps_z() ? make() : Tensor()};
}

LinearBackward linear_backward_outputs(const LinearBackwardArguments& a) {
  const auto& [dy, input, weight, z, activation, output_mask] = a;
  check_floating(kBackward, "dy", dy);
  TORCH_CHECK(dy.dim() > 0, kBackward, ": dy must have a dimension, got ", describe(dy));
  TORCH_CHECK((!output_mask[0] || is_defined(weight)) && (!output_mask[1] || is_defined(input)) &&
                  (activation == Activation::none || is_defined(z)),
              kBackward, ": dinput needs weight, dweight needs input, an activation needs z");
  const auto columns = dy.sym_size(-1);
  if (is_defined(z)) {
    check_like(kBackward, "z", *z, "dy", dy);
    check_shape(kBackward, "z", *z, dy.sym_sizes().vec());
  }
  Tensor dinput, dweight, dbias;
  if (output_mask[0]) {
    check_like(kBackward, "weight", *weight, "dy", dy);
    TORCH_CHECK(weight->dim() == 2 && weight->sym_size(0) == columns, kBackward,
                ": weight must have shape [", columns, ", K], got ", describe(*weight));
    dinput = at::empty_symint(with_last(dy, weight->sym_size(1)), dy.options());
  }
  if (output_mask[1]) {
    check_like(kBackward, "input", *input, "dy", dy);
    const auto depth = input->sym_size(-1);
    check_shape(kBackward, "input", *input, with_last(dy, depth));
    dweight = is_transposed(weight) ? at::empty_symint({depth, columns}, dy.options()).t()
                                    : at::empty_symint({columns, depth}, dy.options());
  }
  if (output_mask[2]) dbias = at::empty_symint({columns}, dy.options());
  return {dinput, dweight, dbias};
}

}  // namespace fusedops::linear
