// Differentiates a family's definition of fusedops/references, which operators call where no kernel
// runs: for float64, functorch, forward-mode gradients, ONNX, a double backward, other devices.
//
// A definition is an operator, "fusedops::X_reference". Its schema is added next to the kernels',
// and fusedops/references/__init__.py registers the Python function.
#pragma once

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <utility>

#include "csrc/ops/autograd.h"

namespace fusedops {

// Records gradients also inside kernel operators, which run below autograd.
class WithAutograd {
 public:
  WithAutograd() : WithAutograd(c10::impl::tls_local_dispatch_key_set()) {}

 private:
  explicit WithAutograd(const c10::impl::LocalDispatchKeySet& keys)
      : keys_(keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView) {
  }

  c10::impl::ForceDispatchKeyGuard keys_;
  at::AutoGradMode grad_mode_{true};
};

// Releases the GIL, which autograd's engine must not hold. Compiled autograd calls a backward with
// it.
class WithoutGil {
 public:
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
};

// The gradients of a definition's outputs for the inputs that need one; the others are undefined.
// They are differentiable if gradients are enabled.
//
// definition: a function of the inputs. grads: of its outputs; undefined ones do not count.
template <size_t n, class Definition>
std::array<Tensor, n> gradients_of(const Definition& definition, std::array<Tensor, n> inputs,
                                   const std::array<bool, n>& needs_grad,
                                   const variable_list& grads) {
  const bool with_graph = at::GradMode::is_enabled();
  const WithAutograd recorded;
  variable_list leaves;
  for (size_t i = 0; i < n; ++i) {
    if (!inputs[i].defined()) continue;
    const bool connected = with_graph && (!needs_grad[i] || inputs[i].requires_grad());
    // An alias, because the node that is running, and locked, may have made the input.
    inputs[i] = connected ? at::alias(inputs[i]) : inputs[i].detach();
    if (needs_grad[i]) leaves.push_back(inputs[i].requires_grad_());
  }
  const variable_list results = definition(inputs);
  variable_list outputs, directions;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!grads[i].defined() || !results[i].requires_grad()) continue;
    outputs.push_back(results[i]);
    directions.push_back(grads[i].to(results[i].scalar_type()));
  }
  std::array<Tensor, n> gradients;
  if (leaves.empty() || outputs.empty()) return gradients;
  const WithoutGil released;
  const auto leaf_gradients = torch::autograd::grad(outputs, leaves, directions, std::nullopt,
                                                    with_graph, /*allow_unused=*/true);
  for (size_t i = 0, next = 0; i < n; ++i) {
    if (needs_grad[i] && inputs[i].defined()) gradients[i] = leaf_gradients[next++];
  }
  return gradients;
}

}  // namespace fusedops
