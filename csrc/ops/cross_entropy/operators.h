// Cross entropy, of logits and of a product. Formulas and shapes:
// fusedops/functional/cross_entropy.py and csrc/kernels/cross_entropy.h.
//
// In the kernel operators the logits are rows [rows, C], the targets int64 [rows], reduction is
// torch's number, and `how` has the options that are numbers. Kept for the backward are lse, [rows]
// float64 (the rest of a float32 counts where z_t is near it), and total, [] float64: the sum of
// the w_t, which "mean" divides by. What a kernel operator was not asked for is undefined.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/cross_entropy.h"

namespace fusedops {

using Numbers = c10::ArrayRef<double>;
using Loss = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // loss, lse, total, dinput
using LinearGradients = std::tuple<Tensor, Tensor, Tensor>;
using LinearLoss = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The options beside tensors.
struct CrossEntropyOptions {
  int64_t ignore_index, reduction;
  double label_smoothing, z_loss;
  LogitMap map;

  CrossEntropyOptions() = default;
  // The public arguments. Raises ValueError, or RuntimeError for label_smoothing as torch.
  CrossEntropyOptions(const char* op, int64_t ignore_index, std::string_view reduction,
                      double label_smoothing, double z_loss, std::optional<double> softcap,
                      std::optional<double> scale);
  // Those of a kernel operator.
  CrossEntropyOptions(int64_t ignore_index, int64_t reduction, Numbers how)
      : ignore_index(ignore_index),
        reduction(reduction),
        label_smoothing(how.at(0)),
        z_loss(how.at(1)),
        map{how.at(2), how.at(3)} {}

  static auto fields(auto& self) {
    return std::tie(self.ignore_index, self.reduction, self.label_smoothing, self.z_loss,
                    self.map.scale, self.map.softcap);
  }
  bool is(Reduction r) const { return reduction == static_cast<int64_t>(r); }
  std::array<double, 4> how() const { return {label_smoothing, z_loss, map.scale, map.softcap}; }
};

// Targets of any shape, one after another.
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

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

// Raises where target and weight do not go with logits of this dtype and shape, or there is no
// loss of this dtype.
void cross_entropy_check(const char* op, const Tensor& input, c10::SymIntArrayRef logits,
                         const Tensor& target, const OptionalTensor& weight,
                         std::optional<c10::ScalarType> dtype);

void linear_cross_entropy_check(const Tensor& input, const Tensor& linear_weight,
                                const Tensor& target, const OptionalTensor& linear_bias,
                                const OptionalTensor& weight, std::optional<c10::ScalarType> dtype);

// loss [] or [rows] in dtype, lse, total, and with_gradient dinput [rows, C] over the gradient of
// the loss.
Loss cross_entropy_outputs(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                           int64_t ignore_index, int64_t reduction, Numbers how,
                           c10::ScalarType dtype, bool with_gradient);

// dinput [rows, C]. grad is the loss's.
Tensor cross_entropy_backward_outputs(const Tensor& grad, const Tensor& input, const Tensor& target,
                                      const OptionalTensor& weight, const Tensor& lse,
                                      const Tensor& total, int64_t ignore_index, int64_t reduction,
                                      Numbers how);

// loss, lse, total, and over the gradient of the loss those of input [rows, H], linear_weight
// [C, H] and linear_bias [C] that were asked for.
LinearLoss linear_cross_entropy_outputs(const Tensor& input, const Tensor& linear_weight,
                                        const Tensor& target, const OptionalTensor& linear_bias,
                                        const OptionalTensor& weight, int64_t ignore_index,
                                        int64_t reduction, Numbers how, c10::ScalarType dtype,
                                        std::array<bool, 3> gradients);

LinearGradients linear_cross_entropy_backward_outputs(
    const Tensor& grad, const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const OptionalTensor& linear_bias, const OptionalTensor& weight, const Tensor& lse,
    const Tensor& total, int64_t ignore_index, int64_t reduction, Numbers how,
    std::array<bool, 3> output_mask);

// composite.cpp: the formulas in ATen calls, differentiable to any order.

// Of logits [C], [N, C] or [N, C, ...], and of probabilities.
Tensor cross_entropy_formula(const Tensor& input, const Tensor& target,
                             const OptionalTensor& weight, const CrossEntropyOptions& options,
                             std::optional<c10::ScalarType> dtype);

// dinput of rows, in input's dtype.
Tensor cross_entropy_gradient(const Tensor& grad, const Tensor& input, const Tensor& target,
                              const OptionalTensor& weight, const CrossEntropyOptions& options);

LinearGradients linear_cross_entropy_gradients(const Tensor& grad, const Tensor& input,
                                               const Tensor& linear_weight, const Tensor& target,
                                               const OptionalTensor& linear_bias,
                                               const OptionalTensor& weight,
                                               const CrossEntropyOptions& options,
                                               std::array<bool, 3> output_mask);

// As the kernel operators.
Loss cross_entropy_composite(const Tensor& input, const Tensor& target,
                             const OptionalTensor& weight, int64_t ignore_index, int64_t reduction,
                             Numbers how, c10::ScalarType dtype, bool with_gradient);
Tensor cross_entropy_backward_composite(const Tensor& grad, const Tensor& input,
                                        const Tensor& target, const OptionalTensor& weight,
                                        const Tensor& lse, const Tensor& total,
                                        int64_t ignore_index, int64_t reduction, Numbers how);
LinearLoss linear_cross_entropy_composite(const Tensor& input, const Tensor& linear_weight,
                                          const Tensor& target, const OptionalTensor& linear_bias,
                                          const OptionalTensor& weight, int64_t ignore_index,
                                          int64_t reduction, Numbers how, c10::ScalarType dtype,
                                          std::array<bool, 3> gradients);
LinearGradients linear_cross_entropy_backward_composite(
    const Tensor& grad, const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const OptionalTensor& linear_bias, const OptionalTensor& weight, const Tensor& lse,
    const Tensor& total, int64_t ignore_index, int64_t reduction, Numbers how,
    std::array<bool, 3> output_mask);

}  // namespace fusedops
