// Declares the operators of cross entropy, from logits or a linear layer, and of log-probabilities.
// Formulas and shapes: fusedops/functional/cross_entropy.py and csrc/kernels/cross_entropy.h.
//
// In the kernel operators the logits are [rows, C], the targets int64 [rows], reduction is torch's
// number, and `scalars` holds the options that are numbers. The backward needs lse, [rows] float64
// (float32 loses digits if z_t is near lse), and total, [] float64: the sum of the w_t, by which
// "mean" divides. Outputs that were not requested are undefined.
//
// Log-probabilities are the negated losses of a linear layer's logits. Their backward needs lse,
// and for the entropy mean, [rows] float64: the sum of p_c z_c.
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
using LogProbs = std::tuple<Tensor, Tensor, Tensor>;  // log_probs, entropy, top1
using LogProbsAndSums = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // then lse, mean

// The options in the schemas' form.
struct LossNumbers {
  int64_t ignore_index, reduction;
  Numbers scalars;

  static auto fields(auto& a) { return std::tie(a.ignore_index, a.reduction, a.scalars); }
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
        label_smoothing(numbers.scalars.at(0)),
        z_loss(numbers.scalars.at(1)),
        map{numbers.scalars.at(2), numbers.scalars.at(3)} {}

  static auto fields(auto& a) {
    return std::tie(a.ignore_index, a.reduction, a.label_smoothing, a.z_loss, a.map.scale,
                    a.map.softcap);
  }
  bool is(Reduction r) const { return reduction == static_cast<int64_t>(r); }
  std::array<double, 4> scalars() const {
    return {label_smoothing, z_loss, map.scale, map.softcap};
  }
};

// The options of log-probabilities. The map includes the temperature.
struct LogProbOptions {
  int64_t ignore_index;
  LogitMap map;

  static auto fields(auto& a) { return std::tie(a.ignore_index, a.map.scale, a.map.softcap); }
  // As the options of each row's loss.
  CrossEntropyOptions loss_options() const;
};

// The same in the schemas' form.
struct LogProbNumbers {
  int64_t ignore_index;
  Numbers scalars;

  static auto fields(auto& a) { return std::tie(a.ignore_index, a.scalars); }
  LogProbOptions options() const { return {ignore_index, {scalars.at(0), scalars.at(1)}}; }
};

// Targets of any shape, flattened.
inline Tensor as_vector(const Tensor& target) {
  return target.dim() == 1 ? target : target.reshape({-1});
}

// Returns [..., H] as a matrix of rows.
inline Tensor as_matrix(const Tensor& input) {
  if (input.dim() == 2) return input;
  return input.dim() == 1 ? input.unsqueeze(0) : input.flatten(0, -2);
}

// autograd.cpp, linear.cpp, log_probs.cpp: the public operators.

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     int64_t ignore_index, std::string_view reduction, double label_smoothing,
                     double z_loss, std::optional<double> softcap, std::optional<double> scale,
                     bool grad_in_forward, std::optional<c10::ScalarType> dtype);

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const OptionalTensor& linear_bias, const OptionalTensor& weight,
                            int64_t ignore_index, std::string_view reduction,
                            double label_smoothing, double z_loss, std::optional<double> softcap,
                            std::optional<double> scale, std::optional<c10::ScalarType> dtype);

LogProbs linear_log_probs(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                          const OptionalTensor& linear_bias, int64_t ignore_index,
                          std::optional<double> softcap, std::optional<double> scale,
                          double temperature, bool return_entropy, bool return_top1,
                          std::optional<c10::ScalarType> dtype);

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

struct LogProbInputs {
  const Tensor &input, &linear_weight, &target;
  const OptionalTensor& linear_bias;

  static auto fields(auto& a) {
    return std::tie(a.input, a.linear_weight, a.target, a.linear_bias);
  }
  LinearLossInputs loss_inputs() const {
    static const OptionalTensor unweighted;
    return {input, linear_weight, target, linear_bias, unweighted};
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

// log_probs [rows] in dtype, entropy [rows] in dtype and top1 [rows] bool if requested, lse, and
// with the entropy mean.
struct LogProbArguments {
  LogProbInputs in;
  LogProbNumbers numbers;
  c10::ScalarType dtype;
  std::array<bool, 2> optional_outputs;  // the entropy, top1

  static auto fields(auto& a) { return std::tie(a.in, a.numbers, a.dtype, a.optional_outputs); }
};
// grad_log_probs, grad_entropy: [rows], undefined if no gradient arrives.
struct LogProbBackwardArguments {
  const OptionalTensor &grad_log_probs, &grad_entropy;
  LogProbInputs in;
  const Tensor& lse;
  const OptionalTensor& mean;
  LogProbNumbers numbers;
  std::array<bool, 3> output_mask;

  static auto fields(auto& a) {
    return std::tie(a.grad_log_probs, a.grad_entropy, a.in, a.lse, a.mean, a.numbers,
                    a.output_mask);
  }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

// Raises if target or weight does not fit logits of this shape, or if dtype cannot be the loss's.
void cross_entropy_check(const char* op, const LossInputs& in, c10::SymIntArrayRef logits,
                         std::optional<c10::ScalarType> dtype);
void linear_cross_entropy_check(const char* op, const LinearLossInputs& in,
                                std::optional<c10::ScalarType> dtype);
void linear_log_probs_check(const LogProbInputs& in, std::optional<c10::ScalarType> dtype);

Loss cross_entropy_outputs(const LossArguments& a);
Tensor cross_entropy_backward_outputs(const LossBackwardArguments& a);
LinearLoss linear_cross_entropy_outputs(const LinearLossArguments& a);
LinearGradients linear_cross_entropy_backward_outputs(const LinearLossBackwardArguments& a);
LogProbsAndSums linear_log_probs_outputs(const LogProbArguments& a);
LinearGradients linear_log_probs_backward_outputs(const LogProbBackwardArguments& a);

// reference.cpp: the definition, differentiable to any order, with all logits in memory.

// Takes logits [C], [N, C] or [N, C, ...], and class indices or probabilities.
Tensor cross_entropy_reference(const LossInputs& in, const CrossEntropyOptions& options,
                               std::optional<c10::ScalarType> dtype);
Tensor linear_cross_entropy_reference(const LinearLossInputs& in,
                                      const CrossEntropyOptions& options,
                                      std::optional<c10::ScalarType> dtype);
// Takes input [..., H] and targets [...].
LogProbs linear_log_probs_reference(const LogProbInputs& in, const LogProbOptions& options,
                                    std::optional<c10::ScalarType> dtype,
                                    std::array<bool, 2> optional_outputs);

// Its gradients for rows of logits or inputs, in their dtypes.
Tensor cross_entropy_gradient(const Tensor& grad, const LossInputs& in,
                              const CrossEntropyOptions& options);
LinearGradients linear_cross_entropy_gradients(const Tensor& grad, const LinearLossInputs& in,
                                               const CrossEntropyOptions& options,
                                               std::array<bool, 3> output_mask);
LinearGradients linear_log_probs_gradients(const OptionalTensor& grad_log_probs,
                                           const OptionalTensor& grad_entropy,
                                           const LogProbInputs& in, const LogProbOptions& options,
                                           std::array<bool, 3> output_mask);

// The kernel operators by the definition.
Loss cross_entropy_forward_reference(const LossArguments& a);
Tensor cross_entropy_backward_reference(const LossBackwardArguments& a);
LinearLoss linear_cross_entropy_forward_reference(const LinearLossArguments& a);
LinearGradients linear_cross_entropy_backward_reference(const LinearLossBackwardArguments& a);
LogProbsAndSums linear_log_probs_forward_reference(const LogProbArguments& a);
LinearGradients linear_log_probs_backward_reference(const LogProbBackwardArguments& a);

}  // namespace fusedops::cross_entropy
