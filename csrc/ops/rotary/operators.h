// The rotary embedding of q and k. Formulas and shapes: fusedops/functional/rotary.py.
//
// The backward is the transposed rotation of the gradients, and so the same kernel.
#pragma once

#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/rotary.h"

namespace fusedops {

using RotaryPair = std::tuple<Tensor, Tensor>;  // of q and of k

// autograd.cpp: the public operator.

RotaryPair rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                            int64_t unsqueeze_dim, bool interleaved);

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

// Raises where q and k cannot be rotated by cos and sin.
void rotary_check(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                  int64_t unsqueeze_dim);

// Whether the kernels take them: cos is broadcast over q and k, not these over cos.
bool rotary_has_kernel(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                       int64_t unsqueeze_dim);

// The dtype of a rotated x.
c10::ScalarType rotary_dtype(c10::ScalarType x, const Tensor& cos, const Tensor& sin);

// The dimension of x that cos, unsqueezed, is broadcast over.
int64_t rotary_head_dim(const Tensor& x, const Tensor& cos, int64_t unsqueeze_dim);

// Both [their shape], with heads inside the sequence or the sequence inside heads, as they have it.
RotaryPair rotary_outputs(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                          int64_t unsqueeze_dim, bool interleaved);

// dq and dk in q's dtype, laid out as what came in. What did not come in is undefined.
RotaryPair rotary_backward_outputs(const OptionalTensor& dq, const OptionalTensor& dk,
                                   const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim,
                                   bool interleaved, c10::ScalarType dtype);

// rows.cpp: what the kernels are told.

// Tensors that the kernels can read, as arguments; these point into them. None is empty.
class RotaryRows {
 public:
  RotaryRows(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
             const RotaryPair& outputs, int64_t unsqueeze_dim, bool interleaved, bool transposed);

  RotaryArguments arguments{};

 private:
  Tensor q_, k_, cos_, sin_;
};

// composite.cpp: the formulas in ATen calls.

// Differentiable to any order, of any shapes that broadcast.
RotaryPair rotary_formula(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                          int64_t unsqueeze_dim, bool interleaved);
RotaryPair rotary_backward_formula(const OptionalTensor& dq, const OptionalTensor& dk,
                                   const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim,
                                   bool interleaved, c10::ScalarType dtype);

// The same, laid out as the kernels' outputs are.
RotaryPair rotary_composite(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                            int64_t unsqueeze_dim, bool interleaved);
RotaryPair rotary_backward_composite(const OptionalTensor& dq, const OptionalTensor& dk,
                                     const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim,
                                     bool interleaved, c10::ScalarType dtype);

}  // namespace fusedops
