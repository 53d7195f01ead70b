// What the operators' autograd shares: nodes, and the choice between kernels and ATen calls.
#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <initializer_list>
#include <memory>
#include <type_traits>

#include "csrc/common.h"

namespace fusedops {

inline OptionalTensor optional(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

// torch 2.11 counts references to nodes in a shared_ptr, 2.13 in an intrusive_ptr.
template <class T>
auto make_node() {
  using Pointer = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// functorch's transforms and forward-mode gradients see through ATen calls, not through the node.
inline bool needs_composite(std::initializer_list<OptionalTensor> tensors) {
  using c10::DispatchKey;
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  if (keys.has(DispatchKey::FuncTorchDynamicLayerBackMode)) return true;
  for (const auto& t : tensors) {
    if (given(t) && (t->scalar_type() == at::kDouble || t->_fw_grad(0).defined())) return true;
  }
  return false;
}

inline bool needs_gradient(std::initializer_list<OptionalTensor> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto& t : tensors) {
    if (given(t) && t->requires_grad()) return true;
  }
  return false;
}

}  // namespace fusedops
