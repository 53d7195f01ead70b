// The matmuls that give the logits and consume their gradients, by ATen.

#include "csrc/cpu/cross_entropy/products.h"

#include <ATen/Functions.h>

#include "csrc/ops/cpu_features.h"
#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops::cpu::cross_entropy {
namespace {

c10::ScalarType product_dtype(c10::ScalarType dtype) {
  return dtype == at::kBFloat16 && fast_bfloat16_products() ? at::kBFloat16 : at::kFloat;
}

Tensor as(const Tensor& t, c10::ScalarType dtype) {
  return !t.defined() || t.scalar_type() == dtype ? t : t.to(dtype);
}

}  // namespace

LogitProducts::LogitProducts(const Tensor& input_, const Tensor& linear_weight,
                             const Tensor& linear_bias)
    : input(as(input_, product_dtype(input_.scalar_type()))),
      linear_weight_(linear_weight),
      linear_bias_(as(linear_bias, input.scalar_type())) {}

Tensor LogitProducts::weight(int64_t first, int64_t n) const {
  return as(part_of(linear_weight_, first, n), input.scalar_type());
}

void LogitProducts::make(const Tensor& logits, int64_t from, int64_t first,
                         const Tensor& weight) const {
  auto out = logits;
  const auto rows = part_of(input, from, logits.size(0));
  if (!linear_bias_.defined()) {
    at::mm_out(out, rows, weight.t());
  } else {
    at::addmm_out(out, part_of(linear_bias_, first, logits.size(1)), rows, weight.t());
  }
}

void LogitProducts::add(const Tensor& into, const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == at::kFloat) {
    into.addmm_(a, b);
  } else {
    into.add_(at::mm(a, b));
  }
}

}  // namespace fusedops::cpu::cross_entropy
