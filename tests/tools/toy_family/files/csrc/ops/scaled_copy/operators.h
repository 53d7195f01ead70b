// Declares scaled_copy's operators: y = scale * x. Shapes: fusedops/functional/scaled_copy.py.
#pragma once

#include "csrc/common.h"

namespace fusedops::scaled_copy {

Tensor scaled_copy(const Tensor& x, double scale);  // the public operator

// Checks the arguments and makes y [x's shape], contiguous. Also the Meta kernel.
Tensor scaled_copy_outputs(const Tensor& x, double scale);

// The formula in ATen calls: the fallback without a kernel.
Tensor scaled_copy_composite(const Tensor& x, double scale);

}  // namespace fusedops::scaled_copy
