// Declares linear's operators: a matmul with its bias and activation. Formulas and shapes:
// fusedops/functional/linear.py.
//
// z = input weight^T + bias, y = activation(z). The kernel operators' tensors have one dtype.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/linear.h"
#include "csrc/ops/operator.h"

namespace fusedops::linear {

constexpr Names<5> names_of(Activation) {
  return {"activation", {"none", "relu", "gelu", "gelu_tanh", "silu"}, true};
}

// autograd.cpp: the public operator.
Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              std::optional<std::string_view> activation);

// The same through the dispatcher; if torch's own functions run anyway, it calls them directly.
Tensor linear_short(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::optional<std::string_view> activation);

// rule.cpp: when kernels are faster.

// Whether csrc/cpu's product of [rows, depth] and [depth, columns] is faster than torch's.
// across: the second operand is column-major, and is transposed while it is packed.
bool own_product_pays(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t depth,
                      bool across);

// The same for csrc/cpu's product of a few rows, which needs contiguous columns.
bool few_rows_pay(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t depth, bool across);

// Whether the kernel operators are faster than torch's functions, alone or with their backward.
bool linear_pays(const Tensor& input, const Tensor& weight, bool activates, bool trains);

// Use the kernels for every size: for a backend that a user chose by name.
void linear_always(bool always);

// y [input's shape but the last, N], z [the same; undefined without an activation or keep_z]
using LinearForward = std::tuple<Tensor, Tensor>;
struct LinearArguments {
  const Tensor &input, &weight;
  const OptionalTensor& bias;
  Activation activation;
  bool keep_z;

  static auto fields(auto& a) {
    return std::tie(a.input, a.weight, a.bias, a.activation, a.keep_z);
  }
  bool keeps_z() const { return keep_z && activation != Activation::none; }
};

// dinput [dy's shape but the last, K], dweight [N, K], dbias [N]. dweight has the weight's memory
// layout, if the weight is given. Outputs that output_mask excludes are undefined. dinput needs
// weight, dweight needs input, an activation needs z.
using LinearBackward = std::tuple<Tensor, Tensor, Tensor>;
struct LinearBackwardArguments {
  const Tensor& dy;
  const OptionalTensor &input, &weight, &z;
  Activation activation;
  std::array<bool, 3> output_mask;

  static auto fields(auto& a) {
    return std::tie(a.dy, a.input, a.weight, a.z, a.activation, a.output_mask);
  }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

void linear_check(const LinearArguments& a);
LinearForward linear_outputs(const LinearArguments& a);
LinearBackward linear_backward_outputs(const LinearBackwardArguments& a);

// Whether a weight is transposed in memory, as Conv1D's is: a gradient with the same layout is
// accumulated without a copy.
bool is_transposed(const OptionalTensor& weight);

// reference.cpp: the same in torch's functions, differentiable to any order.

Tensor as_rows(const Tensor& t);  // [rows, t's last dimension]

Tensor activate(const Tensor& z, Activation activation);
// Returns z's gradient: activation'(z) dy, plus dz, z's own gradient in a double backward. dy or dz
// may be undefined.
Tensor gradient_of_z(const Tensor& dy, const Tensor& dz, const OptionalTensor& z,
                     Activation activation);
LinearForward linear_forward_reference(const LinearArguments& a);
LinearBackward linear_backward_reference(const LinearBackwardArguments& a);
LinearBackward linear_gradients(const Tensor& dz, const OptionalTensor& input,
                                const OptionalTensor& weight, std::array<bool, 3> output_mask);

}  // namespace fusedops::linear
