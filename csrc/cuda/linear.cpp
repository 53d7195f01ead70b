// linear's forward on GPUs: torch's products, with cuBLASLt's epilogue for ReLU and the tanh GELU.
// Nothing waits for the device.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "csrc/ops/linear/operators.h"

namespace fusedops::cuda::linear {

using namespace fusedops::linear;

namespace {

LinearForward linear_forward(const LinearArguments& a) {
  const auto& [input, weight, bias, activation, keep_z] = a;
  const bool by_tanh = activation == Activation::gelu_tanh,
             fits = activation == Activation::relu || by_tanh;
  if (keep_z || !fits || !is_defined(bias) || input.scalar_type() == at::kDouble) {
    return linear_forward_reference(a);
  }
  linear_check(a);
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  const auto y = at::_addmm_activation(*bias, as_rows(input), weight.t(), 1, 1, by_tanh);
  return {y.view(shape), Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CUDA, m) { m.impl("linear_forward", flat<linear_forward>); }

}  // namespace fusedops::cuda::linear
