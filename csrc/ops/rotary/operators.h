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

// What q and k are rotated by, and how they go with it.
struct RotaryTable {
  const Tensor &cos, &sin;
  int64_t unsqueeze_dim;
  bool interleaved;

  static auto fields(auto& a) { return std::tie(a.cos, a.sin, a.unsqueeze_dim, a.interleaved); }
};

// Both [their shape], with heads inside the sequence or the sequence inside heads, as they have it.
struct RotaryForward {
  const Tensor &q, &k;
  RotaryTable table;

  static auto fields(auto& a) { return std::tie(a.q, a.k, a.table); }
};

// dq and dk in q's dtype, laid out as what came in. What did not come in is undefined.
struct RotaryBackward {
  const OptionalTensor &dq, &dk;
  RotaryTable table;
  c10::ScalarType dtype;

  static auto fields(auto& a) { return std::tie(a.dq, a.dk, a.table, a.dtype); }
};

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

// Raises where q and k cannot be rotated.
void rotary_check(const RotaryForward& a);
RotaryPair rotary_outputs(const RotaryForward& a);
RotaryPair rotary_backward_outputs(const RotaryBackward& a);

// Whether the kernels take them: cos is broadcast over q and k, not these over cos.
bool rotary_has_kernel(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table);

// The dtype of a rotated x.
c10::ScalarType rotary_dtype(c10::ScalarType x, const RotaryTable& table);

// The dimension of x that cos, unsqueezed, is broadcast over.
int64_t rotary_head_dim(const Tensor& x, const RotaryTable& table);

// rows.cpp: the kernels' arguments.

// Tensors that the kernels can read, as arguments; these point into them. None is empty.
class RotaryRows {
 public:
  RotaryRows(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table,
             const RotaryPair& outputs, bool transposed);

  RotaryArguments arguments{};

 private:
  Tensor q_, k_, cos_, sin_;
};

// composite.cpp: the formulas in ATen calls.

// Differentiable to any order, of any shapes that broadcast.
RotaryPair rotary_formula(const RotaryForward& a);
RotaryPair rotary_backward_formula(const RotaryBackward& a);

// The same, laid out as the kernels' outputs are.
RotaryPair rotary_composite(const RotaryForward& a);
RotaryPair rotary_backward_composite(const RotaryBackward& a);

}  // namespace fusedops::rotary
