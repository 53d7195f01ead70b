// Declares scaled_add's operators: y = x + scale * residual. Shapes:
// fusedops/functional/scaled_add.py.
#pragma once

#include "csrc/common.h"
#include "csrc/ops/operator.h"

namespace fusedops::scaled_add {

// autograd.cpp: the public operator.

Tensor scaled_add(const Tensor& x, const Tensor& residual, double scale);

// y [x's shape], contiguous.
struct ScaledAddForward {
  const Tensor &x, &residual;
  double scale;

  static auto fields(auto& a) { return std::tie(a.x, a.residual, a.scale); }
};

// dresidual [dy's shape], contiguous; dx is dy itself.
struct ScaledAddBackward {
  const Tensor& dy;
  double scale;

  static auto fields(auto& a) { return std::tie(a.dy, a.scale); }
};

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

Tensor scaled_add_outputs(const ScaledAddForward& a);
Tensor scaled_add_backward_outputs(const ScaledAddBackward& a);

// composite.cpp: the formulas in ATen calls, differentiable to any order.

Tensor scaled_add_composite(const ScaledAddForward& a);
Tensor scaled_add_backward_composite(const ScaledAddBackward& a);

}  // namespace fusedops::scaled_add
