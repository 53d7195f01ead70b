// The gradient of the activation in linear and quantized_linear, on CPUs.
#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/linear/activation.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::linear {

// Returns z's gradient as rows; it is contiguous if there is an activation.
inline Tensor rows_of_dz(const Tensor& dy, const OptionalTensor& z, Activation activation) {
  if (activation == Activation::none) return as_rows(dy);
  const int64_t n = dy.size(-1);
  const Rows rows(dy, n);
  const auto before = z->contiguous();
  auto dz = at::empty({dy.numel() / n, n}, dy.options());
  const ActivateBackwardRows args{
      rows.data(), before.const_data_ptr(), dz.mutable_data_ptr(), n, rows.stride, dtype_of(dy),
      activation};
  auto* const run = activate_backward_rows_for_isa();
  at::parallel_for(0, dz.size(0), std::max<int64_t>(1, kGrain / n),
                   [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return dz;
}

}  // namespace fusedops::cpu::linear
