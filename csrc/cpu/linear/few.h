// A linear layer for a few rows of input: product, bias and activation.
#pragma once

#include "csrc/cpu/linear/output.h"

namespace fusedops::cpu::linear {

// The product x weight^T, with what follows it. weight's rows are contiguous; no size is 0. Bits do
// not depend on the number of threads.
void few_rows(const Tensor& x, const Tensor& weight, const Output& out);

}  // namespace fusedops::cpu::linear
