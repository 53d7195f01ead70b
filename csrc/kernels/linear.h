// The activations that can follow a linear layer's product. Formulas:
// fusedops/functional/linear.py.
#pragma once

#include <cstdint>

namespace fusedops::linear {

enum class Activation : uint8_t { none, relu, gelu, gelu_tanh, silu };

}  // namespace fusedops::linear
