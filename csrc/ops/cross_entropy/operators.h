// Cross entropy of logits, and of a linear layer's logits. Formulas and shapes:
// fusedops/functional/cross_entropy.py and csrc/kernels/cross_entropy.h.
//
// In the kernel operators the logits are [rows, C], the targets int64 [rows], reduction is torch's
// number, and `how` holds the options that are numbers. The backward needs lse, [rows] float64
// (float32 loses digits if z_t is near lse), and total, [] float64: the sum of the w_t, by which
// "mean" divides. Outputs that were not requested are undefined.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/cross_entropy.h"
#include "csrc/ops/operator.h"

namespace fusedops::cross_entropy {

using Numbers = c10::ArrayRef<double>;
using Loss = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // loss, lse, total, dinput
using LinearGradients = std::tuple<Tensor, Tensor, Tensor>;
using LinearLoss = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The options in the schemas' form.
struct LossNumbers {
  int64_t ignore_index, reduction;
  Numbers how;

  static auto fields(auto& a) { return std::tie(a.ignore_index, a.reduction, a.how); }
};

constexpr Names<3> names_of(Reduction) { return {"reduction", {"none", "mean", "sum"}}; }

// The options of a loss.
struct CrossEntropyOptions {
  int64_t ignore_index, reduction;
  double label_smoothing, z_loss;
  LogitMap map;

  CrossEntropyOptions() = default;
  // From the public arguments. Raises ValueError, or RuntimeError for label_smoothing, like torch.
  CrossEntropyOptions(const char* op, int64_t ignore_index, std::string_view reduction,
                      double label_smoothing, double z_loss, std::optional<double> softcap,
                      std::optional<double> scale);
  // A kernel operator's options.
  explicit CrossEntropyOptions(const LossNumbers& numbers)
      : ignore_index(numbers.ignore_index),
        reduction(numbers.reduction),
        label_smoothing(numbers.how.at(0)),
        z_loss(numbers.how.at(1)),
        map{numbers.how.at(2), numbers.how.at(3)} {}

  static auto fields(auto& a) {
    return std::tie(a.ignore_index, a.reduction, a.label_smoothing, a.z_loss, a.map.scale,
                    a.map.softcap);
  }
  bool is(Reduction r) const { return reduction == static_cast<int64_t>(r); }
  std::array<double, 4> how() const { return {label_smoothing, z_loss, map.scale, map.softcap}; }
};

// Targets of any shape, flattened.
inline Tensor as_vector(const Tensor& target) {
  return target.dim() == 1 ? target : target.reshape({-1});
}

// autograd.cpp, linear.cpp: the public operators.

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     int64_t ignore_index, std::string_view reduction, double label_smoothing,
                     double z_loss, std::optional<double> softcap, std::optional<double> scale,
                     bool grad_in_forward, std::optional<c10::ScalarType> dtype);

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const OptionalTensor& linear_bias, const OptionalTensor& weight,
                            int64_t ignore_index, std::string_view reduction,
                            double label_smoothing, double z_loss, std::optional<double> softcap,
                            std::optional<double> scale, std::optional<c10::ScalarType> dtype);

// A call's input tensors.
struct LossInputs {
  const Tensor &input, &target;
  const OptionalTensor& weight;

  static auto fields(auto& a) { return std::tie(a.input, a.target, a.weight); }
};
struct LinearLossInputs {
  const Tensor &input, &linear_weight, &target;
  const OptionalTensor &linear_bias, &weight;

  static auto fields(auto& a) {
    return std::tie(a.input, a.linear_weight, a.target, a.linear_bias, a.weight);
  }
};

// loss [] or [rows] in dtype, lse, total, and with_gradient dinput [rows, C] for a loss gradient
// of 1.
struct LossArguments {
  LossInputs in;
  LossNumbers numbers;
  c10::ScalarType dtype;
  bool with_gradient;

  static auto fields(auto& a) { return std::tie(a.in, a.numbers, a.dtype, a.with_gradient); }
};

// dinput [rows, C]. grad: the loss's gradient.
struct LossBackwardArguments {
  const Tensor& grad;
  LossInputs in;
  const Tensor &lse, &total;
  LossNumbers numbers;

  static auto fields(auto& a) { return std::tie(a.grad, a.in, a.lse, a.total, a.numbers); }
};

// loss, lse, total, and for a loss gradient of 1 the requested gradients of input [rows, H],
// linear_weight [C, H] and linear_bias [C].
struct LinearLossArguments {
  LinearLossInputs in;
  LossNumbers numbers;
  c10::ScalarType dtype;
  std::array<bool, 3> gradients;

  static auto fields(auto& a) { return std::tie(a.in, a.numbers, a.dtype, a.gradients); }
};
struct LinearLossBackwardArguments {
  const Tensor& grad;
  LinearLossInputs in;
  const Tensor &lse, &total;
  LossNumbers numbers;
  std::array<bool, 3> output_mask;

  static auto fields(auto& a) {
    return std::tie(a.grad, a.in, a.lse, a.total, a.numbers, a.output_mask);
  }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

// Raises if target or weight does not fit logits of this shape, or if dtype cannot be the loss's.
void cross_entropy_check(const char* op, const LossInputs& in, c10::SymIntArrayRef logits,
                         std::optional<c10::ScalarType> dtype);
void linear_cross_entropy_check(const LinearLossInputs& in, std::optional<c10::ScalarType> dtype);

Loss cross_entropy_outputs(const LossArguments& a);
Tensor cross_entropy_backward_outputs(const LossBackwardArguments& a);
LinearLoss linear_cross_entropy_outputs(const LinearLossArguments& a);
LinearGradients linear_cross_entropy_backward_outputs(const LinearLossBackwardArguments& a);

// composite.cpp: the formulas in ATen calls, differentiable to any order.

// Takes logits [C], [N, C] or [N, C, ...], and class indices or probabilities.
Tensor cross_entropy_formula(const LossInputs& in, const CrossEntropyOptions& options,
                             std::optional<c10::ScalarType> dtype);

// dinput for rows of logits, in input's dtype.
Tensor cross_entropy_gradient(const Tensor& grad, const LossInputs& in,
                              const CrossEntropyOptions& options);

LinearGradients linear_cross_entropy_gradients(const Tensor& grad, const LinearLossInputs& in,
                                               const CrossEntropyOptions& options,
                                               std::array<bool, 3> output_mask);

// The kernel operators by these formulas.
Loss cross_entropy_composite(const LossArguments& a);
Tensor cross_entropy_backward_composite(const LossBackwardArguments& a);
LinearLoss linear_cross_entropy_composite(const LinearLossArguments& a);
LinearGradients linear_cross_entropy_backward_composite(const LinearLossBackwardArguments& a);

}  // namespace fusedops::cross_entropy
