// linear on GPUs: torch's products, with cuBLASLt's epilogue where that computes the activation.
// Its GELU is the one by tanh. Nothing waits for the device.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "csrc/ops/linear/operators.h"

namespace fusedops::cuda {
namespace {

LinearForward linear_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             std::string_view activation, bool keep_z) {
  const bool fits = activation == "relu" || activation == "gelu_tanh";
  if (keep_z || !fits || !given(bias) || input.scalar_type() == at::kDouble) {
    return linear_forward_composite(input, weight, bias, activation, keep_z);
  }
  linear_check(input, weight, bias, activation);
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  const auto y =
      at::_addmm_activation(*bias, as_rows(input), weight.t(), 1, 1, activation == "gelu_tanh");
  return {y.view(shape), Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CUDA, m) { m.impl("linear_forward", linear_forward); }

}  // namespace fusedops::cuda
