// The public operator: schema, autograd and autocast.

#include <ATen/Functions.h>

#include <string>

#include "csrc/ops/autograd.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/linear/operators.h"
#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops {
namespace {

template <Name name>
QuantizedForward call(const QuantizedArguments& a, bool keep_z) {
  const auto& [qweight, scales, zeros] = a.codes;
  const auto& [format, n, k, group_size] = a.layout;
  return dispatch<name, QuantizedArguments::Signature>(a.x, qweight, scales, zeros, a.bias, format,
                                                       n, k, group_size, a.activation,
                                                       a.input_format, a.compute, keep_z);
}

QuantizedForward forward(const QuantizedArguments& a, bool keep_z) {
  return call<"fusedops::quantized_linear_forward">(a, keep_z);
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
        return dispatch<"fusedops::quantized_linear_backward",
                        QuantizedBackwardArguments::Signature>(grads[0], codes, scales, zeros, z,
                                                               format, n, k, group_size, activation,
                                                               compute, wanted);
      }
      auto dz = grads[0].defined() ? activate_backward(grads[0], z, activation) : grads[1];
      if (grads[0].defined() && through_z) dz = dz + grads[1];
      return quantized_gradients(dz, {{codes, scales, zeros}, {format, n, k, group_size}},
                                 compute_of(compute), wanted);
    }();
    return {dx, dbias};
  }
};

Tensor with_gradient(const QuantizedArguments& a) {
  const auto node = make_node<FusedNode<QuantizedLinearNode>>();
  node->set_next_edges(torch::autograd::collect_next_edges(a.x, value_or_undefined(a.bias)));
  const auto [y, z] = below_autograd([&] { return forward(a, true); });
  torch::autograd::set_history(y, node);
  if (z.defined()) torch::autograd::set_history(z, node);
  const auto& [format, n, k, group_size] = a.layout;
  node->backward = {std::string(format), std::string(a.activation), std::string(a.compute), n, k,
                    group_size};
  node->saved = {saved(a.codes.qweight), saved(a.codes.scales), saved(a.codes.zeros),
                 SavedVariable(z, true)};
  return y;
}

}  // namespace

Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                        const OptionalTensor& zeros, const OptionalTensor& bias,
                        std::string_view format, c10::SymInt out_features, c10::SymInt in_features,
                        int64_t group_size, std::optional<std::string_view> activation,
                        std::optional<std::string_view> input_format,
                        std::optional<std::string_view> compute) {
  TORCH_CHECK(!needs_gradient({scales}),
              "quantized_linear: scales must not require a gradient: there is none of the weight");
  const QuantizedArguments a{x,
                             {qweight, scales, zeros},
                             bias,
                             {format, std::move(out_features), std::move(in_features), group_size},
                             activation.value_or("none"),
                             input_format.value_or("none"),
                             compute.value_or("any"),
                             false};
  if (needs_composite({x, bias})) return std::get<0>(quantized_linear_forward_composite(a));
  if (needs_gradient({x, bias})) return with_gradient(a);
  return std::get<0>(below_autograd([&] { return forward(a, false); }));
}

QuantizedForward quantized_linear_tiles(const QuantizedArguments& a) {
  return call<"fusedops::quantized_linear_tiles">(a, a.keep_z);
}

// Autocast as F.linear's. Scales stay float32.
const Operators operators([](Operators& o) {
  const std::string weight = "Tensor qweight, Tensor scales, Tensor? zeros, ";
  const std::string layout =
      "str format, SymInt out_features, SymInt in_features, int group_size, ";
  const std::string forward =
      "(Tensor x, " + weight + "Tensor? bias, " + layout +
      "str activation, str input_format, str compute, bool keep_z) -> (Tensor y, Tensor z)";
  o.add_public<quantized_linear, Casts<0, 4>>(
      "quantized_linear(Tensor x, " + weight + "Tensor? bias, " + layout +
      "str? activation=None, str? input_format=None, str? compute=None) -> Tensor");
  for (const std::string name : {"quantized_linear_forward", "quantized_linear_tiles"}) {
    o.add_kernel(name + forward, flat<quantized_linear_outputs>,
                 flat<quantized_linear_forward_composite>);
  }
  o.add_kernel("quantized_linear_backward(Tensor dy, " + weight + "Tensor? z, " + layout +
                   "str activation, str compute, bool[2] output_mask)"
                   " -> (Tensor dx, Tensor dbias)",
               flat<quantized_linear_backward_outputs>, flat<quantized_linear_backward_composite>);
  o.add_kernel("dequantize_weight(" + weight + layout + "ScalarType dtype) -> Tensor",
               flat<dequantize_weight_outputs>, flat<dequantize_weight_composite>);
  o.add_kernel("quantize_groups(Tensor groups, str format, float[] shares)"
               " -> (Tensor codes, Tensor scales, Tensor zeros)",
               quantize_groups_outputs);
});

}  // namespace fusedops
