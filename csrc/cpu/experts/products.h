// The experts' matrix products: their rows times their weights, and the weights' gradients.
#pragma once

#include "csrc/cpu/experts/routing.h"

namespace fusedops::cpu::experts {

// out [rows, n] = x [rows, depth] w^T for each expert's rows and its w [n, depth], plus a row of
// bias. w: [E, n, depth], any strides. out: float32, or x's dtype, to which the sums are rounded
// after the bias. bias: [E, n] contiguous, or undefined, and always so if out is float32 and x is
// not. A product of bfloat16 by torch is rounded even if out is float32. Bits do not depend on the
// number of threads.
void grouped_product(const Routing& routing, const Tensor& x, const Tensor& w, const Tensor& bias,
                     const Tensor& out);

// out [E, n, m], any strides, = a^T b over each expert's rows; zeros for an expert without rows.
// a: [rows, n], b: [rows, m], of out's dtype.
void grouped_outer(const Routing& routing, const Tensor& a, const Tensor& b, const Tensor& out);

// A weight [n, depth] for each of E experts.
struct Weight {
  virtual ~Weight() = default;
  virtual int64_t outputs() const = 0;  // n
  // out [rows, n] = x w^T plus a row of bias, as grouped_product.
  virtual void multiply(const Routing& routing, const Tensor& x, const Tensor& bias,
                        const Tensor& out) const = 0;
  // out [rows, depth] = x w
  virtual void multiply_across(const Routing& routing, const Tensor& x,
                               const Tensor& out) const = 0;
};

class FloatWeight : public Weight {
 public:
  explicit FloatWeight(Tensor w) : w_(std::move(w)) {}  // any strides

  int64_t outputs() const override { return w_.size(1); }
  void multiply(const Routing& routing, const Tensor& x, const Tensor& bias,
                const Tensor& out) const override {
    grouped_product(routing, x, w_, bias, out);
  }
  void multiply_across(const Routing& routing, const Tensor& x, const Tensor& out) const override {
    grouped_product(routing, x, w_.transpose(1, 2), Tensor(), out);
  }

 private:
  Tensor w_;
};

}  // namespace fusedops::cpu::experts
