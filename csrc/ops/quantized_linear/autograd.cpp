// The public operator: schema, autograd and autocast.

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>

#include "csrc/ops/autograd.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/linear/operators.h"
#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops {
namespace {

// The options of a call, as the kernel operators take them.
struct How {
  std::string_view format;
  c10::SymInt n, k;
  int64_t group_size;
  std::string_view activation, input_format, compute;
};

QuantizedForward forward(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                         const OptionalTensor& zeros, const OptionalTensor& bias, const How& how,
                         bool keep_z) {
  static const auto op =
      handle<decltype(quantized_linear_outputs)>("fusedops::quantized_linear_forward");
  return op.call(x, qweight, scales, zeros, bias, how.format, how.n, how.k, how.group_size,
                 how.activation, how.input_format, how.compute, keep_z);
}

// Keeps the codes and, for the activation, z, which is an output of the node that nobody sees but
// its own double backward. x is not kept: codes have no gradient.
struct QuantizedLinearNode {
  static constexpr const char* kName = "FusedQuantizedLinearBackward";
  static constexpr size_t kInputs = 2;  // x, bias
  enum : size_t { kCodes, kScales, kZeros, kZ, kSaved };

  std::string format, activation, compute;
  c10::SymInt n, k;
  int64_t group_size = 0;

  static auto fields(auto& self) {
    return std::tie(self.format, self.activation, self.compute, self.n, self.k, self.group_size);
  }

  // grads: of y and, in a double backward, of z.
  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 2> wanted) const {
    const bool through_z = grads.size() > 1 && grads[1].defined();
    if (!grads[0].defined() && !through_z) return variable_list(2);
    const auto codes = saved[kCodes], scales = saved[kScales];
    const auto zeros = optional(saved[kZeros]), z = optional(saved[kZ]);
    const auto [dx, dbias] = [&] {
      if (!through_z && !at::GradMode::is_enabled()) {
        static const auto op = handle<decltype(quantized_linear_backward_outputs)>(
            "fusedops::quantized_linear_backward");
        return op.call(grads[0], codes, scales, zeros, z, format, n, k, group_size, activation,
                       compute, wanted);
      }
      auto dz = grads[0].defined() ? activate_backward(grads[0], z, activation) : grads[1];
      if (grads[0].defined() && through_z) dz = dz + grads[1];
      return quantized_gradients(dz, {codes, scales, zeros, format, n, k, group_size},
                                 compute_of(compute), wanted);
    }();
    return {dx, dbias};
  }
};

Tensor with_gradient(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                     const OptionalTensor& zeros, const OptionalTensor& bias, const How& how) {
  const auto node = make_node<FusedNode<QuantizedLinearNode>>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, value_or_undefined(bias)));
  const auto [y, z] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return forward(x, qweight, scales, zeros, bias, how, true);
  }();
  torch::autograd::set_history(y, node);
  if (z.defined()) torch::autograd::set_history(z, node);
  node->backward = {
      std::string(how.format), std::string(how.activation), std::string(how.compute), how.n, how.k,
      how.group_size};
  node->saved = {SavedVariable(qweight, false), SavedVariable(scales, false),
                 SavedVariable(value_or_undefined(zeros), false), SavedVariable(z, true)};
  return y;
}

// As F.linear under autocast. Scales stay float32.
template <c10::DispatchKey kKey, c10::DeviceType kDevice>
Tensor quantized_linear_autocast(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                                 const OptionalTensor& zeros, const OptionalTensor& bias,
                                 std::string_view format, c10::SymInt out_features,
                                 c10::SymInt in_features, int64_t group_size,
                                 std::optional<std::string_view> activation,
                                 std::optional<std::string_view> input_format,
                                 std::optional<std::string_view> compute) {
  const c10::impl::ExcludeDispatchKeyGuard off(kKey);
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, kDevice); };
  static const auto op = handle<decltype(quantized_linear)>("fusedops::quantized_linear");
  return op.call(cast(x), qweight, scales, zeros, given(bias) ? OptionalTensor(cast(*bias)) : bias,
                 format, std::move(out_features), std::move(in_features), group_size, activation,
                 input_format, compute);
}

}  // namespace

Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                        const OptionalTensor& zeros, const OptionalTensor& bias,
                        std::string_view format, c10::SymInt out_features, c10::SymInt in_features,
                        int64_t group_size, std::optional<std::string_view> activation,
                        std::optional<std::string_view> input_format,
                        std::optional<std::string_view> compute) {
  const How how{format,
                std::move(out_features),
                std::move(in_features),
                group_size,
                activation.value_or("none"),
                input_format.value_or("none"),
                compute.value_or("any")};
  TORCH_CHECK(!needs_gradient({scales}),
              "quantized_linear: scales must not require a gradient: there is none of the weight");
  if (needs_composite({x, bias})) {
    const auto outputs =
        quantized_linear_forward_composite(x, qweight, scales, zeros, bias, how.format, how.n,
                                           how.k, group_size, how.activation, how.input_format,
                                           how.compute, false);
    return std::get<0>(outputs);
  }
  if (needs_gradient({x, bias})) return with_gradient(x, qweight, scales, zeros, bias, how);
  at::AutoDispatchBelowADInplaceOrView below;
  return std::get<0>(forward(x, qweight, scales, zeros, bias, how, false));
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::string weight = "Tensor qweight, Tensor scales, Tensor? zeros, ";
  const std::string layout =
      "str format, SymInt out_features, SymInt in_features, int group_size, ";
  const auto define = [&](const std::string& schema) {
    m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  };
  define("quantized_linear(Tensor x, " + weight + "Tensor? bias, " + layout +
         "str? activation=None, str? input_format=None, str? compute=None) -> Tensor");
  for (const std::string name : {"quantized_linear_forward", "quantized_linear_tiles"}) {
    define(name + "(Tensor x, " + weight + "Tensor? bias, " + layout +
           "str activation, str input_format, str compute, bool keep_z) -> (Tensor y, Tensor z)");
  }
  define("quantized_linear_backward(Tensor dy, " + weight + "Tensor? z, " + layout +
         "str activation, str compute, bool[2] output_mask) -> (Tensor dx, Tensor dbias)");
  define("dequantize_weight(" + weight + layout + "ScalarType dtype) -> Tensor");
  define("quantize_groups(Tensor groups, str format, float[] shares)"
         " -> (Tensor codes, Tensor scales, Tensor zeros)");
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) {
  m.impl("quantized_linear", quantized_linear);
}

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) { m.impl("quantized_linear", quantized_linear); }

TORCH_LIBRARY_IMPL(fusedops, AutocastCPU, m) {
  m.impl("quantized_linear",
         quantized_linear_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(fusedops, AutocastCUDA, m) {
  m.impl("quantized_linear",
         quantized_linear_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("quantized_linear_forward", quantized_linear_forward_composite);
  m.impl("quantized_linear_tiles", quantized_linear_forward_composite);
  m.impl("quantized_linear_backward", quantized_linear_backward_composite);
  m.impl("dequantize_weight", dequantize_weight_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("quantized_linear_forward", quantized_linear_outputs);
  m.impl("quantized_linear_tiles", quantized_linear_outputs);
  m.impl("quantized_linear_backward", quantized_linear_backward_outputs);
  m.impl("dequantize_weight", dequantize_weight_outputs);
  m.impl("quantize_groups", quantize_groups_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("quantized_linear_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("quantized_linear_tiles", torch::autograd::autogradNotImplementedFallback());
  m.impl("quantized_linear_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("dequantize_weight", torch::autograd::autogradNotImplementedFallback());
  m.impl("quantize_groups", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
