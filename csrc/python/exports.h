// Exports operators and functions to Python, to be called without torch.ops. The .cpp files of
// csrc/python list their exports.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "csrc/ops/autograd.h"
#include "csrc/python/errors.h"

namespace fusedops {

// One file's exports: a static in that file. The module fusedops._C collects all of them.
class Exports {
 public:
  using Function = void (*)(py::module_&);

  explicit Exports(Function add) { every().push_back(add); }

  static std::vector<Function>& every() {  // initialized on first use, because statics use it
    static std::vector<Function> all;
    return all;
  }
};

// Whether torch.onnx.export(dynamo=False) is tracing. ONNX does not have our operators.
inline bool exports_onnx() {
  if (!is_recorded()) return false;
  const py::gil_scoped_acquire gil;
  return py::module_::import("torch.onnx").attr("is_in_onnx_export")().cast<bool>();
}

// How a parameter is converted from Python. Sizes are plain integers, because traces never come
// here.
template <class T>
struct FromPython {
  using Type = T;
  static T pass(std::remove_reference_t<T>& from) { return from; }
};
template <>
struct FromPython<c10::SymIntArrayRef> {
  using Type = const std::vector<c10::SymInt>&;
  static c10::SymIntArrayRef pass(Type from) { return from; }
};
template <>
struct FromPython<at::OptionalIntArrayRef> {
  using Type = const std::optional<std::vector<int64_t>>&;
  static at::OptionalIntArrayRef pass(Type from) {
    return from ? at::OptionalIntArrayRef(*from) : std::nullopt;
  }
};
template <>
struct FromPython<c10::SymInt> {
  using Type = int64_t;
  static c10::SymInt pass(Type from) { return from; }
};
template <>
struct FromPython<std::optional<c10::SymInt>> {
  using Type = std::optional<int64_t>;
  static std::optional<c10::SymInt> pass(Type from) { return from; }
};

// Calls a public operator through the dispatcher. An ONNX export traces its ATen calls.
template <Name name, auto f>
struct ShortPath;

template <Name name, class Result, class... Args, Result (*f)(Args...)>
struct ShortPath<name, f> {
  static Result call(typename FromPython<Args>::Type... args) {
    if (exports_onnx()) return f(FromPython<Args>::pass(args)...);
    return dispatch<name, Result(Args...)>(FromPython<Args>::pass(args)...);
  }
};

// Calls a function without the GIL. Errors become Python's, without a C++ backtrace.
template <class Function, class... Args>
void export_function(py::module_& m, const char* name, Function* f, const Args&... args) {
  m.def(name, torch::wrap_pybind_function_no_gil(f), args...);
}

// Exports an operator as a Python function. Its arguments have the schema's names, and Python
// passes them all.
template <Name name, class Result, class... Args>
void export_call(py::module_& m, Result (*call)(Args...)) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.text, "");
  const auto& arguments = op.schema().arguments();
  const auto named = [&](size_t i) {
    const auto& of = arguments.at(i).name();
    return py::arg(of.c_str()).noconvert(of == "causal");  // another object may be a mask
  };
  const char* const short_name = name.text + sizeof("fusedops::") - 1;
  [&]<size_t... i>(std::index_sequence<i...>) {
    export_function(m, short_name, call, named(i)...);
  }(std::index_sequence_for<Args...>());
  explain_type_errors(m, short_name, op.schema());
}

template <Name name, auto f>
void export_operator(py::module_& m) {
  export_call<name>(m, ShortPath<name, f>::call);
}

}  // namespace fusedops
