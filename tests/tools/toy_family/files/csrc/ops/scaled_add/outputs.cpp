// Checks scaled_add's arguments and allocates its kernels' outputs.

#include "csrc/ops/checks.h"
#include "csrc/ops/scaled_add/operators.h"

namespace fusedops::scaled_add {

Tensor scaled_add_outputs(const ScaledAddForward& a) {
  check_floating("scaled_add", "x", a.x);
  check_like("scaled_add", "residual", a.residual, "x", a.x);
  TORCH_CHECK(a.residual.sym_sizes().equals(a.x.sym_sizes()),
              "scaled_add: residual must have shape ", a.x.sym_sizes(), " like x, got ",
              describe(a.residual));
  return empty_contiguous(a.x);
}

Tensor scaled_add_backward_outputs(const ScaledAddBackward& a) {
  check_floating("scaled_add_backward", "dy", a.dy);
  return empty_contiguous(a.dy);
}

}  // namespace fusedops::scaled_add
