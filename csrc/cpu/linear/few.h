// The product of a few rows, with its bias and activation.
#pragma once

#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::linear {

using namespace fusedops::linear;

// y = activation(x weight^T + bias). Also stores z, the value before the activation, if defined.
// weight's rows are contiguous; no size is 0. Bits do not depend on the number of threads.
void few_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              Activation activation, const Tensor& z, const Tensor& y);

}  // namespace fusedops::cpu::linear
