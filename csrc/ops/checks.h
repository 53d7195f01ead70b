// Argument checks that several operators share. Errors say what was wanted and what came.
#pragma once

#include <vector>

#include "csrc/common.h"

namespace fusedops {

inline void check_floating(const char* op, const char* name, const Tensor& t) {
  const auto dtype = t.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
                  dtype == at::kDouble,
              op, ": ", name, " must be float32, float16, bfloat16 or float64, got ", describe(t));
}

inline void check_same_device(const char* op, const char* name, const Tensor& t, const char* like,
                              const Tensor& x) {
  TORCH_CHECK(t.device() == x.device(), op, ": ", name, " must be on ", x.device(), " like ", like,
              ", got ", t.device());
}

inline void check_like(const char* op, const char* name, const Tensor& t, const char* like,
                       const Tensor& x) {
  check_same_device(op, name, t, like, x);
  TORCH_CHECK(t.scalar_type() == x.scalar_type(), op, ": ", name, " must be ",
              describe(x.scalar_type(), t.sym_sizes()), " like ", like, ", got ", describe(t));
}

inline void check_shape(const char* op, const char* name, const Tensor& t,
                        const std::vector<c10::SymInt>& shape) {
  TORCH_CHECK(t.sym_sizes().equals(shape), op, ": ", name, " must have shape ",
              c10::SymIntArrayRef(shape), ", got ", describe(t));
}

// Whether a tensor's numbers are in memory: not if it is traced or wrapped by torch.func.
inline bool has_numbers(const Tensor& t) {
  using c10::DispatchKey;
  const c10::DispatchKeySet wrapped({DispatchKey::Python, DispatchKey::Functionalize,
                                     DispatchKey::FuncTorchBatched, DispatchKey::Batched});
  return t.has_storage() && !t.is_meta() && !t.key_set().has_any(wrapped) &&
         !c10::impl::tls_is_dispatch_key_included(DispatchKey::Python);
}

// Returns x's shape with another last dimension.
inline std::vector<c10::SymInt> with_last(const Tensor& x, const c10::SymInt& n) {
  auto shape = x.sym_sizes().vec();
  shape.back() = n;
  return shape;
}

}  // namespace fusedops
