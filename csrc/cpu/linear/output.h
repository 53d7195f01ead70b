// The steps after a linear layer's product: the bias, the rounding to the output's dtype, the
// activation.
#pragma once

#include "csrc/cpu/isa/linear/activation.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::linear {

// y = activation(sums + bias); z, if defined, gets the value before the activation. All are
// contiguous.
struct Output {
  Tensor y, z, bias;
  Activation activation = Activation::none;

  // Writes rows [row, row + rows) of columns [begin, begin + columns). sums: their first one.
  void write(const float* sums, int64_t ld, int64_t row, int64_t rows, int64_t begin,
             int64_t columns) const {
    const int64_t n = y.size(-1);
    const auto at = [&](const Tensor& t) -> char* {
      if (!t.defined()) return nullptr;
      return static_cast<char*>(t.mutable_data_ptr()) + (row * n + begin) * t.element_size();
    };
    const auto* const shift =
        bias.defined() ? static_cast<const char*>(bias.const_data_ptr()) + begin * y.element_size()
                       : nullptr;
    const ActivateRows args{sums, shift, at(z),       at(y),          columns,
                            ld,   n,     dtype_of(y), Dtype::float32, activation};
    activate_rows_for_isa()(args, 0, rows);
  }
};

}  // namespace fusedops::cpu::linear
