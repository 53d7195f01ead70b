// Declares the rotary embedding's operators, for q and k together. Formulas and shapes:
// fusedops/functional/rotary.py.
//
// The backward is the transposed rotation of the gradients, and so the same kernel.
#pragma once

#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/rotary.h"
#include "csrc/ops/operator.h"

namespace fusedops::rotary {

using RotaryPair = std::tuple<Tensor, Tensor>;  // of q and of k

// autograd.cpp: the public operator.

RotaryPair rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                            int64_t unsqueeze_dim, bool interleaved);

// The cosines and sines, and how they apply to q and k.
struct RotaryTable {
  const Tensor &cos, &sin;
  int64_t unsqueeze_dim;
  bool interleaved;

  static auto fields(auto& a) { return std::tie(a.cos, a.sin, a.unsqueeze_dim, a.interleaved); }
};

// Returns q and k rotated, each with its shape and its order of heads and sequence in memory.
struct RotaryForward {
  const Tensor &q, &k;
  RotaryTable table;

  static auto fields(auto& a) { return std::tie(a.q, a.k, a.table); }
};

// Returns dq and dk in q's dtype, with the gradients' memory layout. Undefined if the gradient is.
struct RotaryBackward {
  const OptionalTensor &dq, &dk;
  RotaryTable table;
  c10::ScalarType dtype;

  static auto fields(auto& a) { return std::tie(a.dq, a.dk, a.table, a.dtype); }
};

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

// Raises if q and k cannot be rotated.
void rotary_check(const RotaryForward& a);
RotaryPair rotary_outputs(const RotaryForward& a);
RotaryPair rotary_backward_outputs(const RotaryBackward& a);

// Whether the kernels take the arguments: cos is broadcast to q and k, and never the reverse.
bool rotary_has_kernel(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table);

// Returns the dtype of x after rotation.
c10::ScalarType rotary_dtype(c10::ScalarType x, const RotaryTable& table);

// Returns the dimension of x over which cos is broadcast after unsqueezing.
int64_t rotary_head_dim(const Tensor& x, const RotaryTable& table);

// rows.cpp: the kernels' arguments.

// Holds tensors that the kernels can read, and arguments that point into them. None is empty.
class RotaryRows {
 public:
  RotaryRows(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table,
             const RotaryPair& outputs, bool transposed);

  RotaryArguments arguments{};

 private:
  Tensor q_, k_, cos_, sin_;
};

// composite.cpp: the formulas in ATen calls.

// Rotates by the formula: differentiable to any order, for any shapes that broadcast.
RotaryPair rotary_formula(const RotaryForward& a);
RotaryPair rotary_backward_formula(const RotaryBackward& a);

// Like that, with the memory layout of the kernels' outputs.
RotaryPair rotary_composite(const RotaryForward& a);
RotaryPair rotary_backward_composite(const RotaryBackward& a);

}  // namespace fusedops::rotary
