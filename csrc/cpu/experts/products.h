// Products of the experts' rows with the experts' weights.
#pragma once

#include "csrc/cpu/experts/routing.h"

namespace fusedops::cpu::experts {

// out [rows, n] = x [rows, depth] w^T for each expert's rows and its w [n, depth], plus a row of
// bias. w: [E, n, depth], any strides. out: float32, or x's dtype, to which the sums are rounded
// after the bias. bias: [E, n] contiguous, or undefined, and always so if out is float32 and x is
// not. Bits do not depend on the number of threads.
void grouped_product(const Routing& routing, const Tensor& x, const Tensor& w, const Tensor& bias,
                     const Tensor& out);

// out [E, n, m], any strides, = a^T b over each expert's rows; zeros for an expert without rows.
// a: [rows, n], b: [rows, m], of out's dtype.
void grouped_outer(const Routing& routing, const Tensor& a, const Tensor& b, const Tensor& out);

}  // namespace fusedops::cpu::experts
