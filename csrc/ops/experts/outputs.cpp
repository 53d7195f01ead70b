// Checks the experts operators' arguments and allocates the outputs that their kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/checks.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::experts {
namespace {

constexpr const char* kName = "experts";

void check_options(const Options& o) {
  TORCH_CHECK_VALUE(!o.limit || *o.limit >= 0, kName, ": limit must be at least 0, got ",
                    o.limit.value_or(0));
  TORCH_CHECK_VALUE(o.gated || (!o.limit && o.up_offset == 0 && !o.interleaved), kName,
                    ": limit, up_offset and interleaved need gated=True");
  TORCH_CHECK_VALUE(o.activation == Activation::silu || o.alpha == 1, kName,
                    ": alpha needs activation='silu', got alpha ", o.alpha);
}

void check_routing(const Routed& a) {
  const auto &index = a.top_k_index, &weights = a.top_k_weights;
  const auto tokens = a.tokens();
  TORCH_CHECK(index.scalar_type() == at::kLong && index.dim() == 2 && index.sym_size(0) == tokens,
              kName, ": top_k_index must be int64 [", tokens, ", k], got ", describe(index));
  check_same_device(kName, "top_k_index", index, "hidden", a.hidden);
  check_floating(kName, "top_k_weights", weights);
  check_same_device(kName, "top_k_weights", weights, "hidden", a.hidden);
  check_shape(kName, "top_k_weights", weights, index.sym_sizes().vec());
}

// Checks that a weight is [E, rows, columns], or [E, columns, rows] if transposed.
void check_weight(const char* name, const Tensor& weight, const Inputs& a, const c10::SymInt& rows,
                  const c10::SymInt& columns) {
  const auto experts = a.gate_up.sym_size(0);
  check_like(kName, name, weight, "hidden", a.hidden);
  a.options.transposed ? check_shape(kName, name, weight, {experts, columns, rows})
                       : check_shape(kName, name, weight, {experts, rows, columns});
}

void check_bias(const char* name, const OptionalTensor& bias, const Routed& a,
                const c10::SymInt& columns) {
  if (!is_defined(bias)) return;
  check_like(kName, name, *bias, "hidden", a.hidden);
  check_shape(kName, name, *bias, {a.experts, columns});
}

void check_biases(const Routed& a) {
  check_bias("gate_up_bias", a.gate_up_bias, a, a.wide());
  check_bias("down_bias", a.down_bias, a, a.width());
}

void check_hidden(const Tensor& hidden) {
  check_floating(kName, "hidden", hidden);
  TORCH_CHECK(hidden.dim() == 2, kName, ": hidden must be [tokens, H], got ", describe(hidden));
}

void check_dimensions(const char* name, const Tensor& t) {
  TORCH_CHECK(t.dim() == 3, kName, ": ", name, " must have 3 dimensions, got ", describe(t));
}

void check_backward(const Routed& a, const Tensor& dy, const Tensor& z,
                    bool needs_gate_up_bias_grad, bool needs_down_bias_grad) {
  check_like("experts_backward", "dy", dy, "hidden", a.hidden);
  check_shape("experts_backward", "dy", dy, a.hidden.sym_sizes().vec());
  check_like("experts_backward", "z", z, "hidden", a.hidden);
  check_shape("experts_backward", "z", z, {a.slots(), a.wide()});
  TORCH_CHECK((is_defined(a.gate_up_bias) || !needs_gate_up_bias_grad) &&
                  (is_defined(a.down_bias) || !needs_down_bias_grad),
              "experts_backward: the gradient of a bias needs that bias");
}

Tensor like(const OptionalTensor& t, bool needs_grad) {
  return needs_grad ? empty_contiguous(*t) : Tensor();
}

}  // namespace

Routed::Routed(const Inputs& a)
    : hidden(a.hidden),
      top_k_index(a.top_k_index),
      top_k_weights(a.top_k_weights),
      gate_up_bias(a.gate_up_bias),
      down_bias(a.down_bias),
      options(a.options),
      experts(a.gate_up.sym_size(0)),
      inner(a.down.sym_size(a.options.transposed ? 1 : 2)) {}

Routed::Routed(const QuantizedInputs& a)
    : hidden(a.hidden),
      top_k_index(a.top_k_index),
      top_k_weights(a.top_k_weights),
      gate_up_bias(a.gate_up_bias),
      down_bias(a.down_bias),
      options(a.options),
      experts(a.gate_up.qweight.sym_size(0)),
      inner(a.weights.inner) {}

QuantizedTensors gate_up_of(const QuantizedInputs& a) {
  const Routed n(a);
  return {a.gate_up,
          {a.weights.format, n.wide(), n.width(), a.weights.gate_up_group},
          n.experts,
          kName,
          "gate_up."};
}

QuantizedTensors down_of(const QuantizedInputs& a) {
  const Routed n(a);
  return {a.down,
          {a.weights.format, n.width(), n.inner, a.weights.down_group},
          n.experts,
          kName,
          "down."};
}

void experts_check(const Inputs& a) {
  check_options(a.options);
  check_hidden(a.hidden);
  check_dimensions("gate_up", a.gate_up);
  check_dimensions("down", a.down);
  const Routed n(a);
  check_routing(n);
  check_weight("down", a.down, a, n.width(), n.inner);
  check_weight("gate_up", a.gate_up, a, n.wide(), n.width());
  check_biases(n);
}

void experts_check(const QuantizedInputs& a) {
  check_options(a.options);
  check_hidden(a.hidden);
  TORCH_CHECK_VALUE(a.weights.compute != Compute::int8, kName,
                    ": compute must be None, 'exact' or 'bf16', got 'int8'");
  TORCH_CHECK_VALUE(!a.options.transposed, kName, ": transposed needs weights that are tensors");
  TORCH_CHECK(a.weights.inner >= 0, kName, ": inner must not be negative, got ", a.weights.inner);
  check_dimensions("gate_up.qweight", a.gate_up.qweight);
  check_dimensions("down.qweight", a.down.qweight);
  const Routed n(a);
  check_routing(n);
  check_same_device(kName, "gate_up", a.gate_up.qweight, "hidden", a.hidden);
  check_same_device(kName, "down", a.down.qweight, "hidden", a.hidden);
  gate_up_of(a);
  down_of(a);
  check_biases(n);
}

template <class AnyInputs>
ExpertsForward experts_outputs(const ForwardOf<AnyInputs>& a) {
  experts_check(a.inputs);
  const Routed n(a.inputs);
  const auto options = n.hidden.options();
  return {at::empty_symint({n.tokens(), n.width()}, options),
          a.keep_z ? at::empty_symint({n.slots(), n.wide()}, options) : Tensor()};
}

template ExpertsForward experts_outputs(const ForwardOf<Inputs>& a);
template ExpertsForward experts_outputs(const ForwardOf<QuantizedInputs>& a);

ExpertsBackward experts_backward_outputs(const BackwardArguments& a) {
  const auto& in = a.inputs;
  const auto& mask = a.output_mask;
  experts_check(in);
  check_backward(in, a.dy, a.z, mask[4], mask[5]);
  return {like(in.hidden, mask[0]), like(in.top_k_weights, mask[1]), like(in.gate_up, mask[2]),
          like(in.down, mask[3]),   like(in.gate_up_bias, mask[4]),  like(in.down_bias, mask[5])};
}

QuantizedExpertsBackward quantized_experts_backward_outputs(const QuantizedBackwardArguments& a) {
  const auto& in = a.inputs;
  const auto& mask = a.output_mask;
  experts_check(in);
  check_backward(in, a.dy, a.z, mask[2], mask[3]);
  return {like(in.hidden, mask[0]), like(in.top_k_weights, mask[1]), like(in.gate_up_bias, mask[2]),
          like(in.down_bias, mask[3])};
}

}  // namespace fusedops::experts
