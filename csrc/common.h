// Tensor functions that operators and kernels share: optional arguments, contiguous copies, dtypes
// and rows, operator handles, and a tensor's description in error messages.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>

#include "csrc/kernels/dtype.h"

namespace fusedops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline bool is_defined(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// One of several arguments, not copied: each copy would count the tensor's owners up and down.
struct Argument {
  Argument(const Tensor& t) : tensor(t.defined() ? &t : nullptr) {}
  Argument(const OptionalTensor& t) : tensor(is_defined(t) ? &*t : nullptr) {}

  const Tensor* tensor;  // null if there is none
};
using Arguments = std::initializer_list<Argument>;

inline Tensor value_or_undefined(const OptionalTensor& t) { return t.value_or(Tensor()); }
inline const Tensor& value_or_undefined(const Tensor& t) { return t; }

// Returns an operator's typed handle. Look it up once and keep it in a static.
template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline std::string describe(c10::ScalarType dtype, c10::SymIntArrayRef sizes) {
  std::ostringstream text;
  text << c10::getDtypeNames(dtype).first << ' ' << sizes;
  return text.str();
}

inline std::string describe(const Tensor& t) { return describe(t.scalar_type(), t.sym_sizes()); }

// Returns a contiguous tensor with x's shape. `empty_like` would keep x's strides.
inline Tensor empty_contiguous(const Tensor& x, c10::ScalarType dtype) {
  return at::empty_symint(x.sym_sizes(), x.options().dtype(dtype));
}

inline Tensor empty_contiguous(const Tensor& x) { return empty_contiguous(x, x.scalar_type()); }

// Each tensor made contiguous; undefined ones stay undefined.
template <class... T>
std::tuple<T...> contiguous(const std::tuple<T...>& tensors) {
  const auto of = [](const Tensor& t) { return t.defined() ? t.contiguous() : t; };
  return std::apply([&](const auto&... t) { return std::tuple<T...>(of(t)...); }, tensors);
}

// Copies each tensor of `from` into its counterpart in `into`, where that is defined.
template <class... T>
void copy_defined(const std::tuple<T...>& into, const std::tuple<T...>& from) {
  const auto put = [](const Tensor& to, const Tensor& t) {
    if (to.defined()) to.copy_(t);
  };
  std::apply(
      [&](const auto&... to) { std::apply([&](const auto&... t) { (put(to, t), ...); }, from); },
      into);
}

// How kernels describe a tensor: its dtype, and where its rows are.

inline Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Dtype::float32;
    case at::kBFloat16: return Dtype::bfloat16;
    default: return Dtype::float16;
  }
}

// The dtype in which formulas are evaluated.
inline c10::ScalarType accumulation_dtype(c10::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline bool any_float64(Arguments arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const Argument& argument) {
    return argument.tensor != nullptr && argument.tensor->scalar_type() == at::kDouble;
  });
}

inline const void* data_or_null(const Tensor& t) {
  return t.defined() ? t.const_data_ptr() : nullptr;
}

inline void* mutable_data_or_null(const Tensor& t) {
  return t.defined() ? t.mutable_data_ptr() : nullptr;
}

// A tensor as contiguous rows of n elements. Copied only if its strides do not allow that.
struct Rows {
  Tensor tensor;
  int64_t stride;

  Rows(const Tensor& t, int64_t n) : tensor(t), stride(n) {
    if (t.is_contiguous()) return;
    const auto row_stride = stride_of(t, n);
    tensor = row_stride ? t : t.contiguous();
    stride = row_stride.value_or(n);
  }
  const void* data() const { return tensor.const_data_ptr(); }

 private:
  // The rows' stride, if the last dimension is a row and the other dimensions only count rows.
  static std::optional<int64_t> stride_of(const Tensor& t, int64_t n) {
    if (t.size(-1) != n || t.stride(-1) != 1) return std::nullopt;
    int64_t rows = 1, stride = n;
    for (int64_t d = t.dim() - 2; d >= 0; --d) {
      if (t.size(d) == 1) continue;
      if (rows == 1) stride = t.stride(d);
      if (t.stride(d) != rows * stride) return std::nullopt;
      rows *= t.size(d);
    }
    return stride;
  }
};

}  // namespace fusedops
