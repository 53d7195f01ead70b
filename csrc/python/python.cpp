// The module fusedops._C: what Python calls without going through torch.ops. One line an export.

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/ops/bfloat16.h"
#include "csrc/cpu/isa.h"
#include "csrc/cpu/quantized_linear/plan.h"
#include "csrc/ops/attention/operators.h"
#include "csrc/ops/autograd.h"
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

// Calls an operator by its handle in the dispatcher. An export to ONNX traces its ATen calls.
template <auto kOperator, class... Args>
auto call(const char* name, Args&&... args) {
  static const auto op = handle<std::remove_pointer_t<decltype(kOperator)>>(name);
  return exports_onnx() ? kOperator(args...) : op.call(args...);
}

Tensor layer_norm(const Tensor& input, const std::vector<c10::SymInt>& normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return call<&fusedops::layer_norm>("fusedops::layer_norm", input,
                                     c10::SymIntArrayRef(normalized_shape), weight, bias, eps);
}

Tensor rms_norm(const Tensor& input, const std::vector<c10::SymInt>& normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps, std::string_view rounding,
                double offset) {
  return call<&fusedops::rms_norm>("fusedops::rms_norm", input,
                                   c10::SymIntArrayRef(normalized_shape), weight, eps, rounding,
                                   offset);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, double dropout_p) {
  return call<&fusedops::add_layer_norm>("fusedops::add_layer_norm", x, residual, weight, bias, eps,
                                         dropout_p);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        std::string_view rounding, double offset,
                                        double dropout_p) {
  return call<&fusedops::add_rms_norm>("fusedops::add_rms_norm", x, residual, weight, eps, rounding,
                                       offset, dropout_p);
}

Tensor swiglu(const Tensor& gate, const OptionalTensor& up, std::optional<double> limit,
              double alpha, double up_offset) {
  return call<&fusedops::swiglu>("fusedops::swiglu", gate, up, limit, alpha, up_offset);
}

Tensor geglu(const Tensor& gate, const OptionalTensor& up, std::string_view approximate) {
  return call<&fusedops::geglu>("fusedops::geglu", gate, up, approximate);
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              std::optional<std::string_view> activation) {
  return exports_onnx() ? fusedops::linear(input, weight, bias, activation)
                        : linear_short(input, weight, bias, activation);
}

Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                        const OptionalTensor& zeros, const OptionalTensor& bias,
                        std::string_view format, int64_t out_features, int64_t in_features,
                        int64_t group_size, std::optional<std::string_view> activation,
                        std::optional<std::string_view> input_format,
                        std::optional<std::string_view> compute) {
  return call<&fusedops::quantized_linear>("fusedops::quantized_linear", x, qweight, scales, zeros,
                                           bias, format, out_features, in_features, group_size,
                                           activation, input_format, compute);
}

RotaryPair rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                            int64_t unsqueeze_dim, bool interleaved) {
  return call<&fusedops::rotary_embedding>("fusedops::rotary_embedding", q, k, cos, sin,
                                           unsqueeze_dim, interleaved);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     int64_t ignore_index, std::string_view reduction, double label_smoothing,
                     double z_loss, std::optional<double> softcap, std::optional<double> scale,
                     bool grad_in_forward, std::optional<c10::ScalarType> dtype) {
  return call<&fusedops::cross_entropy>("fusedops::cross_entropy", input, target, weight,
                                        ignore_index, reduction, label_smoothing, z_loss, softcap,
                                        scale, grad_in_forward, dtype);
}

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const OptionalTensor& linear_bias, const OptionalTensor& weight,
                            int64_t ignore_index, std::string_view reduction,
                            double label_smoothing, double z_loss, std::optional<double> softcap,
                            std::optional<double> scale, std::optional<c10::ScalarType> dtype) {
  return call<&fusedops::linear_cross_entropy>("fusedops::linear_cross_entropy", input,
                                               linear_weight, target, linear_bias, weight,
                                               ignore_index, reduction, label_smoothing, z_loss,
                                               softcap, scale, dtype);
}

OutAndLse attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                    std::optional<std::vector<int64_t>> window, std::optional<double> softcap,
                    const OptionalTensor& sinks, const OptionalTensor& bias,
                    std::optional<double> scale, double dropout_p,
                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                    std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k,
                    bool top_left) {
  const auto sym = [](std::optional<int64_t> n) {
    return n ? std::optional<c10::SymInt>(*n) : std::nullopt;
  };
  at::OptionalIntArrayRef sides;
  if (window) sides = at::IntArrayRef(*window);
  return call<&fusedops::attention>("fusedops::attention", q, k, v, causal, sides, softcap, sinks,
                                    bias, scale, dropout_p, cu_seqlens_q, cu_seqlens_k,
                                    sym(max_seqlen_q), sym(max_seqlen_k), top_left);
}

std::unique_ptr<AdamWBucket> adamw_bucket(const py::list& params, const py::list& states,
                                          const std::vector<int64_t>& kinds) {
  const auto borrowed = [](const py::list& objects) {
    std::vector<PyObject*> found;
    for (const auto& object : objects) found.push_back(object.ptr());
    return found;
  };
  return std::make_unique<AdamWBucket>(borrowed(params), borrowed(states), kinds);
}

Tensor adamw_bucket_squares(AdamWBucket& bucket) { return bucket.squares(); }

void adamw_bucket_step(AdamWBucket& bucket, const std::vector<double>& options,
                       const std::vector<Tensor>& lrs, int64_t seed, const OptionalTensor& squares,
                       double max_grad_norm, const OptionalTensor& grad_scale,
                       const OptionalTensor& found_inf) {
  bucket.step(options, lrs, seed, squares, max_grad_norm, grad_scale, found_inf);
}

void export_optimizers(py::module_& m) {
  py::class_<AdamWBucket>(m, "AdamWBucket")
      .def(py::init(&adamw_bucket))
      .def("unchanged",
           [](const AdamWBucket& b, const py::dict& s) { return b.unchanged(s.ptr()); })
      .def("squares", torch::wrap_pybind_function(adamw_bucket_squares))
      .def("step", torch::wrap_pybind_function(adamw_bucket_step))
      .def("renew_table", &AdamWBucket::renew_table);
  m.def("same_objects",
        [](const py::list& a, const py::list& b) { return same_objects(a.ptr(), b.ptr()); });
  m.def("any_gradient", any_gradient);
}

// Errors become Python's own (without a C++ backtrace), and the GIL is free meanwhile.
template <class Function, class... Args>
void export_function(py::module_& m, const char* name, Function* f, const Args&... args) {
  m.def(name, torch::wrap_pybind_function_no_gil(f), args...);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using py::arg, py::none, py::kw_only;
  export_function(m, "layer_norm", layer_norm, arg("input"), arg("normalized_shape"),
                  arg("weight") = none(), arg("bias") = none(), arg("eps") = 1e-5);
  export_function(m, "rms_norm", rms_norm, arg("input"), arg("normalized_shape"),
                  arg("weight") = none(), arg("eps") = none(), kw_only(), arg("rounding") = "torch",
                  arg("offset") = 0.0);
  export_function(m, "add_layer_norm", add_layer_norm, arg("x"), arg("residual"),
                  arg("weight") = none(), arg("bias") = none(), arg("eps") = 1e-5, kw_only(),
                  arg("dropout_p") = 0.0);
  export_function(m, "add_rms_norm", add_rms_norm, arg("x"), arg("residual"),
                  arg("weight") = none(), arg("eps") = 1e-6, kw_only(), arg("rounding") = "llama",
                  arg("offset") = 0.0, arg("dropout_p") = 0.0);
  export_function(m, "swiglu", swiglu, arg("gate"), arg("up") = none(), kw_only(),
                  arg("limit") = none(), arg("alpha") = 1.0, arg("up_offset") = 0.0);
  export_function(m, "geglu", geglu, arg("gate"), arg("up") = none(), kw_only(),
                  arg("approximate") = "none");
  export_function(m, "linear", linear, arg("input"), arg("weight"), arg("bias") = none(),
                  arg("activation") = none());
  export_function(m, "quantized_linear", quantized_linear, arg("x"), arg("qweight"), arg("scales"),
                  arg("zeros"), arg("bias"), arg("format"), arg("out_features"), arg("in_features"),
                  arg("group_size"), arg("activation") = none(), arg("input_format") = none(),
                  arg("compute") = none());
  export_function(m, "rotary_embedding", rotary_embedding, arg("q"), arg("k"), arg("cos"),
                  arg("sin"), kw_only(), arg("unsqueeze_dim") = 1, arg("interleaved") = false);
  export_function(m, "cross_entropy", cross_entropy, arg("input"), arg("target"),
                  arg("weight") = none(), arg("ignore_index") = -100, arg("reduction") = "mean",
                  arg("label_smoothing") = 0.0, arg("z_loss") = 0.0, arg("softcap") = none(),
                  arg("scale") = none(), arg("grad_in_forward") = false, arg("dtype") = none());
  export_function(m, "linear_cross_entropy", linear_cross_entropy, arg("input"),
                  arg("linear_weight"), arg("target"), arg("linear_bias") = none(),
                  arg("weight") = none(), arg("ignore_index") = -100, arg("reduction") = "mean",
                  arg("label_smoothing") = 0.0, arg("z_loss") = 0.0, arg("softcap") = none(),
                  arg("scale") = none(), arg("dtype") = none());
  export_function(m, "attention", attention, arg("q"), arg("k"), arg("v"),
                  arg("causal").noconvert() = false, arg("window") = none(),
                  arg("softcap") = none(), arg("sinks") = none(), arg("bias") = none(),
                  arg("scale") = none(), arg("dropout_p") = 0.0, arg("cu_seqlens_q") = none(),
                  arg("cu_seqlens_k") = none(), arg("max_seqlen_q") = none(),
                  arg("max_seqlen_k") = none(), arg("top_left") = false);
  export_function(m, "quantized_linear_plan", cpu::quantized_linear_plan);
  export_function(m, "quantized_linear_gpu_plan", quantized_linear_gpu_plan);
  export_function(m, "quantized_linear_way", quantized_linear_way);
  m.attr("most_integers") = kMostIntegers;
  m.def("nf4_table", [] { return std::vector<float>(std::begin(kNf4), std::end(kNf4)); });
  export_function(m, "linear_always", linear_always);
  export_function(m, "own_product_pays", own_product_pays);
  export_function(m, "bfloat16_products", bfloat16_products);
  export_function(m, "norm_outputs", norm_outputs);
  export_function(m, "norm_backward_outputs", norm_backward_outputs);
  export_optimizers(m);
  m.def("cpu_isa", [] { return cpu::isa_name(cpu::isa()); });
}

}  // namespace
}  // namespace fusedops
