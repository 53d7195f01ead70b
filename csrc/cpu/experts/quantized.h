// The experts' quantized weights, and matrix products of the experts' rows with them.
#pragma once

#include "csrc/cpu/experts/products.h"
#include "csrc/cpu/quantized_linear/products.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::cpu::experts {

using fusedops::experts::Compute, fusedops::experts::QuantizedTensors;

// Which kernel of quantized_linear multiplies depends on an expert's number of rows.
class QuantizedWeight : public Weight {
 public:
  QuantizedWeight(QuantizedTensors w, Compute compute);

  int64_t outputs() const override { return codes_.n; }
  void multiply(const Routing& routing, const Tensor& x, const Tensor& bias,
                const Tensor& out) const override;
  void multiply_across(const Routing& routing, const Tensor& x, const Tensor& out) const override;

 private:
  std::vector<quantized_linear::Product> products(const Routing& routing, const Tensor& x,
                                                  const Tensor& bias, const Tensor& out) const;

  QuantizedTensors w_;
  Compute compute_;
  quantized_linear::Codes codes_;  // the first expert's
  int64_t bytes_, scales_;         // of one expert
};

}  // namespace fusedops::cpu::experts
