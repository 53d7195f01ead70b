// What follows a linear layer's product: the bias, the rounding to the output's dtype, the
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
    const auto at = [&](const Tensor& t, int64_t i) -> char* {
      return t.defined() ? static_cast<char*>(t.mutable_data_ptr()) + i * t.element_size()
                         : nullptr;
    };
    const int64_t start = row * n + begin;
    const ActivateRows args{sums, at(bias, begin), at(z, start),   at(y, start), columns, ld,
                            n,    dtype_of(y),     Dtype::float32, activation};
    activate_rows_for_isa()(args, 0, rows);
  }
};

}  // namespace fusedops::cpu::linear
