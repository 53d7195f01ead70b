// scaled_add in ATen calls: the fallback without a kernel, and double backward.

#include <ATen/TensorOperators.h>

#include "csrc/ops/scaled_add/operators.h"

namespace fusedops::scaled_add {

Tensor scaled_add_composite(const ScaledAddForward& a) {
  scaled_add_outputs(a);  // checks
  const auto wide = accumulation_dtype(a.x.scalar_type());
  return (a.x.to(wide) + a.residual.to(wide) * a.scale).to(a.x.scalar_type()).contiguous();
}

Tensor scaled_add_backward_composite(const ScaledAddBackward& a) {
  const auto wide = accumulation_dtype(a.dy.scalar_type());
  return (a.dy.to(wide) * a.scale).to(a.dy.scalar_type()).contiguous();
}

}  // namespace fusedops::scaled_add
