// Scales the gradients that a forward pass has computed, by the gradient of the loss.
#pragma once

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/graph_task.h>

#include "csrc/ops/checks.h"

namespace fusedops::cross_entropy {

// Whether the forward may compute gradients of this dtype. In float16 a mean's gradients underflow
// to 0 before GradScaler's factor is applied.
inline bool may_make_gradient(c10::ScalarType dtype) { return dtype != at::kHalf; }

// unscaled: [rows, ...], overwritten unless the graph is kept. grad: [] or [rows].
inline Tensor scaled_gradient(const Tensor& unscaled, const Tensor& grad) {
  if (!unscaled.defined()) return unscaled;
  const bool is_scalar = grad.dim() == 0,
             given_away =
                 has_numbers(grad) && !torch::autograd::get_current_graph_task_keep_graph();
  if (given_away && is_scalar && grad.is_cpu() && grad.item<double>() == 1) return unscaled;
  // On a GPU a 0-dimensional tensor would be rounded to the other operand's dtype.
  const auto g = !is_scalar ? grad.unsqueeze(-1) : grad.is_cpu() ? grad : grad.unsqueeze(0);
  return given_away ? unscaled.mul_(g) : at::mul(unscaled, g).to(unscaled.scalar_type());
}

}  // namespace fusedops::cross_entropy
