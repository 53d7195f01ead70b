// The steps after a linear layer's product: the bias, the rounding to the output's dtype, the
// activation.
#pragma once

#include "csrc/cpu/isa/linear/activation.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::linear {

// y = activation(sums + bias), [rows, n]; z, unless null, gets the value before the activation. All
// have one dtype.
struct Output {
  void *y, *z;
  const void* bias;  // [n], or null
  int64_t n;
  Dtype dtype;
  Activation activation = Activation::none;

  // Writes rows [row, row + rows) of columns [begin, begin + columns). sums: their first one.
  void write(const float* sums, int64_t ld, int64_t row, int64_t rows, int64_t begin,
             int64_t columns) const {
    const int64_t size = size_of(dtype);
    const auto at = [&](void* p) {
      return p == nullptr ? nullptr : static_cast<char*>(p) + (row * n + begin) * size;
    };
    const auto* const shift =
        bias == nullptr ? nullptr : static_cast<const char*>(bias) + begin * size;
    const ActivateRows args{sums, shift, at(z), at(y),          columns,
                            ld,   n,     dtype, Dtype::float32, activation};
    activate_rows_for_isa()(args, 0, rows);
  }
};

}  // namespace fusedops::cpu::linear
