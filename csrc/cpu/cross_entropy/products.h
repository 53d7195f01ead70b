// The matmuls that give the logits and consume their gradients. torch computes them: in bfloat16 if
// csrc/ops/cpu_features.h says that is faster, else with operands converted to float32.
#pragma once

#include "csrc/common.h"

namespace fusedops::cpu::cross_entropy {

// Returns entries [from, from + n) of the first dimension.
inline Tensor part_of(const Tensor& t, int64_t from, int64_t n) {
  return n == t.size(0) ? t : t.narrow(0, from, n);
}

class LogitProducts {
 public:
  // input [rows, features], linear_weight [classes, features], linear_bias [classes] or undefined.
  LogitProducts(const Tensor& input, const Tensor& linear_weight, const Tensor& linear_bias);

  Tensor input;  // in the matmuls' dtype

  // Returns classes [first, first + n) of the weight, in that dtype.
  Tensor weight(int64_t first, int64_t n) const;

  // Fills logits [rows, classes], whose first row is `from` and first class is `first`.
  void make(const Tensor& logits, int64_t from, int64_t first, const Tensor& weight) const;

  // into += a b, in float32
  static void add(const Tensor& into, const Tensor& a, const Tensor& b);

 private:
  Tensor linear_weight_, linear_bias_;
};

}  // namespace fusedops::cpu::cross_entropy
