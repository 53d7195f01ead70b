// Decides whether a call needs differentiable ATen calls instead of a kernel, and whether an input
// needs a gradient.
#pragma once

#include "csrc/common.h"
#include "csrc/ops/node.h"
#include "csrc/ops/operator.h"

namespace fusedops {

inline OptionalTensor optional(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

// Whether torch.jit.trace or an ONNX export is recording the operators that run.
inline bool is_recorded() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return (keys.included_ - keys.excluded_).has(c10::DispatchKey::Tracer);
}

// functorch's transforms, forward-mode gradients and exports to ONNX need ATen calls, because they
// cannot see through the node. csrc/python/exports.h sends an export here with tracing on.
inline bool needs_composite(Arguments arguments) {
  using c10::DispatchKey;
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  if (keys.included_.has(DispatchKey::FuncTorchDynamicLayerBackMode)) return true;
  if (is_recorded()) return true;
  for (const auto& [t] : arguments) {
    if (t && (t->scalar_type() == at::kDouble || t->_fw_grad(0).defined())) return true;
  }
  return false;
}

inline bool needs_gradient(Arguments arguments) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto& [t] : arguments) {
    if (t && t->requires_grad()) return true;
  }
  return false;
}

}  // namespace fusedops
