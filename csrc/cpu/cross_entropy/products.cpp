#include "csrc/cpu/cross_entropy/products.h"

#include <ATen/Functions.h>

#include "csrc/ops/cross_entropy/cross_entropy.h"

namespace fusedops::cpu {
namespace {

c10::ScalarType product_dtype(c10::ScalarType dtype) {
  return dtype == at::kBFloat16 && fast_bfloat16_products() ? at::kBFloat16 : at::kFloat;
}

}  // namespace

Products::Products(const Tensor& input_, const Tensor& linear_weight, const Tensor& linear_bias)
    : input(input_.to(product_dtype(input_.scalar_type()))),
      linear_weight_(linear_weight),
      linear_bias_(linear_bias.defined() ? linear_bias.to(input.scalar_type()) : linear_bias) {}

Tensor Products::weight(int64_t first, int64_t n) const {
  return linear_weight_.narrow(0, first, n).to(input.scalar_type());
}

void Products::make(const Tensor& logits, int64_t from, int64_t first, const Tensor& weight) const {
  auto out = logits;
  const auto rows = input.narrow(0, from, logits.size(0));
  if (!linear_bias_.defined()) {
    at::mm_out(out, rows, weight.t());
  } else {
    at::addmm_out(out, linear_bias_.narrow(0, first, logits.size(1)), rows, weight.t());
  }
}

void Products::add(const Tensor& into, const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == at::kFloat) {
    into.addmm_(a, b);
  } else {
    into.add_(at::mm(a, b));
  }
}

}  // namespace fusedops::cpu
