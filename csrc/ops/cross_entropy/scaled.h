// A gradient that the forward pass has made, times that of the loss.
#pragma once

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/graph_task.h>

#include "csrc/common.h"

namespace fusedops {

// Whether a tensor has numbers that may be looked at: not while a graph is traced.
inline bool readable(const Tensor& t) {
  using c10::DispatchKey;
  return t.is_cpu() && !t.key_set().has_any(
                           c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Functionalize}));
}

// made: [rows, ...], which is given away unless the graph is kept. grad: [] or [rows].
inline Tensor scaled_gradient(const Tensor& made, const Tensor& grad) {
  if (!made.defined()) return made;
  const bool kept = torch::autograd::get_current_graph_task_keep_graph();
  if (!kept && grad.dim() == 0 && readable(grad) && grad.item<double>() == 1) return made;
  const auto g = grad.dim() == 0 ? grad : grad.unsqueeze(-1);
  return kept ? at::mul(made, g).to(made.scalar_type()) : made.mul_(g);
}

}  // namespace fusedops
