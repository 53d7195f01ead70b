// quantized_linear's operators: schemas, autograd, autocast, and the choice between kernels and
// the definition.

#include <ATen/Functions.h>

#include <string>

#include "csrc/ops/autograd.h"
#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::quantized_linear {
namespace {

QuantizedForward forward(const QuantizedArguments& a) {
  return below_autograd(
      [&] { return call<"fusedops::quantized_linear_forward", QuantizedForward>(a); });
}

// Saves the codes and, for the activation, z, an output that only the node's own double backward
// sees. x is not saved, because codes have no gradient.
struct QuantizedLinearNode {
  static constexpr const char* kName = "FusedQuantizedLinearBackward";
  static constexpr size_t kInputs = 2;  // x, bias
  enum : size_t { kCodes, kScales, kZeros, kZ, kSaved };

  QuantizedLayout layout;
  Activation activation;
  Compute compute;

  static auto fields(auto& a) { return std::tie(a.layout, a.activation, a.compute); }

  // grads: the gradients of y and, in a double backward, of z.
  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 2> needs_grad) const {
    const bool through_z = grads.size() > 1 && grads[1].defined();
    if (!grads[0].defined() && !through_z) return variable_list(2);
    const auto qweight = saved[kCodes], scales = saved[kScales];
    const auto zeros = optional(saved[kZeros]), z = optional(saved[kZ]);
    const QuantizedCodes codes{qweight, scales, zeros};
    const auto [dx, dbias] = [&] {
      if (!through_z && !at::GradMode::is_enabled()) {
        return call<"fusedops::quantized_linear_backward", QuantizedBackward>(
            QuantizedBackwardArguments{grads[0], codes, z, layout, activation, compute,
                                       needs_grad});
      }
      const auto dz = gradient_of_z(grads[0], through_z ? grads[1] : Tensor(), z, activation);
      return quantized_gradients(dz, codes, layout, compute, needs_grad);
    }();
    return {dx, dbias};
  }
};

void check_no_gradient_of_codes(const QuantizedArguments& a) {
  bool needs_grad = a.keep_z;
  for (const auto& t : {a.bias, a.x_scale}) {
    needs_grad = needs_grad || (is_defined(t) && t->_fw_grad(0).defined());
  }
  TORCH_CHECK(!needs_grad, kQuantizedLinear,
              ": codes have no gradient, but the scale or the bias requires one (call it under "
              "torch.no_grad())");
}

Tensor with_gradient(const QuantizedArguments& a) {
  const auto node = node_of<FusedNode<QuantizedLinearNode>>(a.x, a.bias);
  const auto [y, z] = forward(a);
  torch::autograd::set_history(y, node);
  if (z.defined()) torch::autograd::set_history(z, node);
  node->backward = {a.layout, a.activation, a.compute};
  node->saved = {saved(a.codes.qweight), saved(a.codes.scales), saved(a.codes.zeros),
                 SavedVariable(z, true)};
  return y;
}

// Autocast casts as for F.linear. Scales and codes stay; a product of codes has autocast's dtype.
struct CastsFloats {
  template <class Arguments>
  static void apply(Arguments& args, c10::ScalarType to, c10::DeviceType device) {
    const auto cast = [&](auto& t) { t = at::autocast::cached_cast(to, t, device); };
    auto& out_dtype = std::get<13>(args);
    cast(std::get<4>(args));  // bias
    if (!is_defined(std::get<12>(args))) {
      cast(std::get<0>(args));
    } else if (out_dtype != at::kDouble) {
      out_dtype = to;
    }
  }
};

}  // namespace

Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                        const OptionalTensor& zeros, const OptionalTensor& bias,
                        std::string_view format, c10::SymInt out_features, c10::SymInt in_features,
                        int64_t group_size, std::optional<std::string_view> activation,
                        std::optional<std::string_view> input_format,
                        std::optional<std::string_view> compute, const OptionalTensor& x_scale,
                        std::optional<c10::ScalarType> out_dtype) {
  TORCH_CHECK(!needs_gradient({scales}),
              "quantized_linear: scales must not require a gradient: the weight has none");
  const bool trains = needs_gradient({x, bias, x_scale});
  const QuantizedArguments a{x,
                             {qweight, scales, zeros},
                             bias,
                             {from_name<WeightFormat>(kQuantizedLinear, format),
                              std::move(out_features), std::move(in_features), group_size},
                             from_name<Activation>(kQuantizedLinear, activation.value_or("none")),
                             from_name<InputFormat>(kQuantizedLinear,
                                                    input_format.value_or("none")),
                             from_name<Compute>(kQuantizedLinear, compute.value_or("any")),
                             trains,
                             x_scale,
                             out_dtype};
  if (a.x_is_codes()) check_no_gradient_of_codes(a);
  if (needs_composite({x, bias})) return std::get<0>(quantized_linear_forward_reference(a));
  return trains ? with_gradient(a) : std::get<0>(forward(a));
}

QuantizedForward quantized_linear_tiles(const QuantizedArguments& a) {
  return call<"fusedops::quantized_linear_tiles", QuantizedForward>(a);
}

const Operators operators([](Operators& o) {
  const std::string weight = "Tensor qweight, Tensor scales, Tensor? zeros, ";
  const std::string layout =
      "str format, SymInt out_features, SymInt in_features, int group_size, ";
  const std::string forward =
      "(Tensor x, " + weight + "Tensor? bias, " + layout +
      "str activation, str input_format, str compute, bool keep_z, Tensor? x_scale=None, "
      "ScalarType? out_dtype=None) -> (Tensor y, Tensor z)";
  o.add_public<quantized_linear, CastsFloats>(
      "quantized_linear(Tensor x, " + weight + "Tensor? bias, " + layout +
      "str? activation=None, str? input_format=None, str? compute=None, Tensor? x_scale=None, "
      "ScalarType? out_dtype=None) -> Tensor");
  for (const std::string name : {"quantized_linear_forward", "quantized_linear_tiles"}) {
    o.add_kernel(name + forward, flat<quantized_linear_outputs>,
                 flat<quantized_linear_forward_reference>);
  }
  o.add_kernel("quantized_linear_backward(Tensor dy, " + weight + "Tensor? z, " + layout +
                   "str activation, str compute, bool[2] output_mask)"
                   " -> (Tensor dx, Tensor dbias)",
               flat<quantized_linear_backward_outputs>, flat<quantized_linear_backward_reference>);
  o.add_kernel("dequantize_weight(" + weight + layout + "ScalarType dtype) -> Tensor",
               flat<dequantize_weight_outputs>, flat<dequantize_weight_reference>);
  o.add_kernel("quantize_groups(Tensor groups, str format, float[] shares)"
               " -> (Tensor codes, Tensor scales, Tensor zeros)",
               quantize_groups_outputs);
});

}  // namespace fusedops::quantized_linear
