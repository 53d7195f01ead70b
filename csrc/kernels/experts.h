// The activations in a mixture of experts. Formulas: fusedops/functional/experts.py.
#pragma once

#include "csrc/kernels/linear.h"

namespace fusedops::experts {

// linear's in their order, then those that linear lacks.
enum class Activation : uint8_t { none, relu, gelu, gelu_tanh, silu, relu2 };
static_assert(static_cast<int>(Activation::silu) == static_cast<int>(linear::Activation::silu));

}  // namespace fusedops::experts
