// The module fusedops._C: the functions that Python calls without going through torch.ops.

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/cpu/isa.h"
#include "csrc/cpu/quantized_linear/plan.h"
#include "csrc/ops/attention/operators.h"
#include "csrc/ops/autograd.h"
#include "csrc/ops/cpu_features.h"
#include "csrc/ops/cross_entropy/operators.h"
#include "csrc/ops/gated_activation/operators.h"
#include "csrc/ops/linear/operators.h"
#include "csrc/ops/norm/operators.h"
#include "csrc/ops/quantized_linear/operators.h"
#include "csrc/ops/rotary/operators.h"
#include "csrc/python/optimizer.h"

namespace fusedops {
namespace {

// Whether torch.onnx.export(dynamo=False) is tracing: ONNX has none of our operators.
bool exports_onnx() {
  if (!is_recorded()) return false;
  const py::gil_scoped_acquire gil;
  return py::module_::import("torch.onnx").attr("is_in_onnx_export")().cast<bool>();
}

// How a parameter is converted from Python. Sizes come as integers, because no trace comes here.
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

// Calls a public operator by its dispatcher handle. An export to ONNX traces its ATen calls.
template <Name name, auto f>
struct ShortPath;

template <Name name, class Result, class... Args, Result (*f)(Args...)>
struct ShortPath<name, f> {
  static Result call(typename FromPython<Args>::Type... args) {
    if (exports_onnx()) return f(FromPython<Args>::pass(args)...);
    return dispatch<name, Result(Args...)>(FromPython<Args>::pass(args)...);
  }
};

Tensor short_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::optional<std::string_view> activation) {
  return exports_onnx() ? linear::linear(input, weight, bias, activation)
                        : linear::linear_short(input, weight, bias, activation);
}

// Errors become Python exceptions without a C++ backtrace; the GIL is released during the call.
template <class Function, class... Args>
void export_function(py::module_& m, const char* name, Function* f, const Args&... args) {
  m.def(name, torch::wrap_pybind_function_no_gil(f), args...);
}

// Arguments have the schema's names and no defaults: Python passes them all.
template <Name name, class Result, class... Args>
void export_call(py::module_& m, Result (*call)(Args...)) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.text, "");
  const auto& arguments = op.schema().arguments();
  const auto named = [&](size_t i) {
    const auto& of = arguments.at(i).name();
    return py::arg(of.c_str()).noconvert(of == "causal");  // another object may be a mask
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    export_function(m, name.text + sizeof("fusedops::") - 1, call, named(i)...);
  }(std::index_sequence_for<Args...>());
}

template <Name name, auto f>
void export_operator(py::module_& m) {
  export_call<name>(m, ShortPath<name, f>::call);
}

void export_optimizers(py::module_& m) {
  using adamw::AdamWBucket;
  using Objects = const std::vector<py::handle>&;
  py::class_<AdamWBucket>(m, "AdamWBucket")
      .def(py::init<Objects, Objects, const std::vector<int64_t>&>())
      .def("unchanged",
           [](const AdamWBucket& b, const py::dict& s) { return b.unchanged(s.ptr()); })
      .def("squares", torch::wrap_pybind_function(&AdamWBucket::squares))
      .def("step", torch::wrap_pybind_function(&AdamWBucket::step))
      .def("renew_table", &AdamWBucket::renew_table);
  m.def("same_objects",
        [](const py::list& a, const py::list& b) { return adamw::same_objects(a.ptr(), b.ptr()); });
  m.def("any_gradient", adamw::any_gradient);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  export_operator<"fusedops::layer_norm", norm::layer_norm>(m);
  export_operator<"fusedops::rms_norm", norm::rms_norm>(m);
  export_operator<"fusedops::add_layer_norm", norm::add_layer_norm>(m);
  export_operator<"fusedops::add_rms_norm", norm::add_rms_norm>(m);
  export_operator<"fusedops::swiglu", gated_activation::swiglu>(m);
  export_operator<"fusedops::geglu", gated_activation::geglu>(m);
  export_operator<"fusedops::quantized_linear", quantized_linear::quantized_linear>(m);
  export_operator<"fusedops::rotary_embedding", rotary::rotary_embedding>(m);
  export_operator<"fusedops::cross_entropy", cross_entropy::cross_entropy>(m);
  export_operator<"fusedops::linear_cross_entropy", cross_entropy::linear_cross_entropy>(m);
  export_operator<"fusedops::attention", attention::attention>(m);
  export_call<"fusedops::linear">(m, short_linear);
  export_function(m, "quantized_linear_plan", cpu::quantized_linear::quantized_linear_plan);
  export_function(m, "quantized_linear_gpu_plan", quantized_linear::quantized_linear_gpu_plan);
  export_function(m, "quantized_linear_way", quantized_linear::quantized_linear_way);
  m.attr("most_integers") = quantized_linear::kMostIntegers;
  m.def("nf4_table", [] {
    return std::vector<float>(std::begin(quantized_linear::kNf4), std::end(quantized_linear::kNf4));
  });
  export_function(m, "linear_always", linear::linear_always);
  export_function(m, "own_product_pays", linear::own_product_pays);
  export_function(m, "bfloat16_products", bfloat16_products);
  export_function(m, "norm_outputs", flat<norm::norm_outputs>);
  export_function(m, "norm_backward_outputs", flat<norm::norm_backward_outputs>);
  export_optimizers(m);
  m.def("cpu_isa", [] { return cpu::isa_name(cpu::isa()); });
}

}  // namespace
}  // namespace fusedops
