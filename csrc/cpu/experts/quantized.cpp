// Matrix products of the experts' rows with their quantized weights, by quantized_linear's kernels.

#include "csrc/cpu/experts/quantized.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace fusedops::cpu::experts {

QuantizedWeight::QuantizedWeight(QuantizedTensors w, Compute compute)
    : w_(std::move(w)), compute_(compute), codes_(quantized_linear::codes_of(w_)) {
  const int64_t experts = std::max<int64_t>(w_.qweight.size(0), 1);
  bytes_ = w_.qweight.numel() / experts;
  scales_ = w_.scales.numel() / experts;
}

void QuantizedWeight::multiply(const Routing& routing, const Tensor& x, const Tensor& bias,
                               const Tensor& out) const {
  quantized_linear::multiply_each(products(routing, x, bias, out), compute_);
}

void QuantizedWeight::multiply_across(const Routing& routing, const Tensor& x,
                                      const Tensor& out) const {
  quantized_linear::multiply_across_each(products(routing, x, Tensor(), out), compute_);
}

std::vector<quantized_linear::Product> QuantizedWeight::products(const Routing& routing,
                                                                 const Tensor& x,
                                                                 const Tensor& bias,
                                                                 const Tensor& out) const {
  std::vector<quantized_linear::Product> expert_products;
  for (const auto& share : routing.shares) {
    auto codes = codes_;
    codes.codes += share.expert * bytes_;
    codes.scales += share.expert * scales_;
    if (codes.zeros != nullptr) codes.zeros += share.expert * scales_;
    expert_products.push_back({codes, x.narrow(0, share.first, share.count),
                               bias.defined() ? bias.select(0, share.expert) : Tensor(),
                               out.narrow(0, share.first, share.count)});
  }
  return expert_products;
}

}  // namespace fusedops::cpu::experts
