// Declares the rotary embedding's operators, for q and k together. Formulas and shapes:
// fusedops/functional/rotary.py.
//
// The backward is the transposed rotation of the gradients, so it uses the same kernel.
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

// The rotation of q and k: its cosines and sines, and how they are broadcast.
struct RotaryTable {
  const Tensor &cos, &sin;
  int64_t unsqueeze_dim;
  bool interleaved;

  static auto fields(auto& a) { return std::tie(a.cos, a.sin, a.unsqueeze_dim, a.interleaved); }
};

// The rotated q and k [their shapes], with their memory order of heads and sequence.
struct RotaryForward {
  const Tensor &q, &k;
  RotaryTable table;

  static auto fields(auto& a) { return std::tie(a.q, a.k, a.table); }
};

// dq and dk in q's dtype and the gradients' memory layout; undefined if the gradient is.
struct RotaryBackward {
  const OptionalTensor &dq, &dk;
  RotaryTable table;
  c10::ScalarType dtype;

  static auto fields(auto& a) { return std::tie(a.dq, a.dk, a.table, a.dtype); }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

// Raises if q and k cannot be rotated.
void rotary_check(const RotaryForward& a);
RotaryPair rotary_outputs(const RotaryForward& a);
RotaryPair rotary_backward_outputs(const RotaryBackward& a);

// Whether the kernels take q and k: they broadcast cos over q and k, but not q and k over cos.
bool rotary_has_kernel(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table);

// Returns the dtype of x after rotation.
c10::ScalarType rotary_dtype(c10::ScalarType x, const RotaryTable& table);

// Returns the dimension of x over which cos is broadcast after unsqueezing.
int64_t rotary_head_dim(const Tensor& x, const RotaryTable& table);

// rows.cpp: builds the kernels' arguments.

// The kernels' arguments, and the tensors that they point into. No tensor is empty.
class RotaryRows {
 public:
  RotaryRows(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table,
             const RotaryPair& outputs, bool transposed);

  RotaryArguments arguments{};

 private:
  Tensor q_, k_, cos_, sin_;
};

// reference.cpp: the definition, differentiable to any order, for any shapes that broadcast.

RotaryPair rotary_reference(const RotaryForward& a);
RotaryPair rotary_gradients(const RotaryBackward& a);

// The same, with the memory layout of the kernels' outputs.
RotaryPair rotary_forward_reference(const RotaryForward& a);
RotaryPair rotary_backward_reference(const RotaryBackward& a);

}  // namespace fusedops::rotary
