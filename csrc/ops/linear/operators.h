// linear: a product with its bias and activation. Formulas and shapes:
// fusedops/functional/linear.py.
//
// z = input weight^T + bias, y = activation(z). In the kernel operators the activation is "none"
// where there is none, and the tensors have one dtype.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/linear.h"
#include "csrc/ops/operator.h"

namespace fusedops {

// Of an activation that the checks have seen.
inline Activation activation_of(std::string_view name) {
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  return name == "silu" ? Activation::silu : Activation::none;
}

// autograd.cpp: the public operator.
Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              std::optional<std::string_view> activation);

// The same by the dispatcher, unless torch's lines run in any case: these go there by themselves.
Tensor linear_short(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::optional<std::string_view> activation);

// rule.cpp: where kernels are worth it.

// Whether csrc/cpu's product of [rows, depth] and [depth, columns] is faster than torch's.
// across: the second lies with its columns apart, and is transposed while it is packed.
bool own_product_pays(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t depth,
                      bool across);

// Whether the kernel operators are faster than torch's lines, by themselves or with their backward.
bool linear_pays(const Tensor& input, const Tensor& weight, bool activates, bool trains);

// Whatever the size: a backend that was asked for by name is taken.
void linear_always(bool always);

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

void linear_check(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  std::string_view activation);

// y [input's shape but the last, N], z [the same; undefined without an activation or keep_z]
using LinearForward = std::tuple<Tensor, Tensor>;
LinearForward linear_outputs(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             std::string_view activation, bool keep_z);

// Whether a weight lies transposed in memory, as Conv1D's does: a gradient that lies likewise is
// accumulated without a copy.
bool lies_across(const OptionalTensor& weight);

// dinput [dy's shape but the last, K], dweight [N, K], dbias [N]; dweight lies in memory as a
// weight that is given. What output_mask leaves out is undefined; dinput needs weight, dweight
// needs input, an activation needs z.
using LinearBackward = std::tuple<Tensor, Tensor, Tensor>;
LinearBackward linear_backward_outputs(const Tensor& dy, const OptionalTensor& input,
                                       const OptionalTensor& weight, const OptionalTensor& z,
                                       std::string_view activation,
                                       std::array<bool, 3> output_mask);

// composite.cpp: the same in ATen calls, differentiable to any order.

Tensor as_rows(const Tensor& t);  // [rows, t's last dimension]

Tensor activate(const Tensor& z, std::string_view activation);
LinearForward linear_forward_composite(const Tensor& input, const Tensor& weight,
                                       const OptionalTensor& bias, std::string_view activation,
                                       bool keep_z);
LinearBackward linear_backward_composite(const Tensor& dy, const OptionalTensor& input,
                                         const OptionalTensor& weight, const OptionalTensor& z,
                                         std::string_view activation,
                                         std::array<bool, 3> output_mask);
// activation'(z) dy, which is the gradient of z; and what follows from that
Tensor activate_backward(const Tensor& dy, const OptionalTensor& z, std::string_view activation);
LinearBackward linear_gradients(const Tensor& dz, const OptionalTensor& input,
                                const OptionalTensor& weight, std::array<bool, 3> output_mask);

}  // namespace fusedops
