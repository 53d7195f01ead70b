// Checks the gated activations' arguments and allocates the outputs that their kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/checks.h"
#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::gated_activation {
namespace {

const char* operator_name(GatedKind kind) { return kind == GatedKind::swiglu ? "swiglu" : "geglu"; }

void check_packed(const char* op, const Tensor& gate) {
  TORCH_CHECK(gate.dim() > 0 && gate.sym_size(-1) % 2 == 0, op,
              ": without up, gate must be packed, gate and up side by side in a last dimension of "
              "even size, got ",
              describe(gate));
}

void check_up(const char* op, const Tensor& gate, const Tensor& up) {
  check_floating(op, "up", up);
  check_same_device(op, "up", up, "gate", gate);
  TORCH_CHECK(up.sym_sizes().equals(gate.sym_sizes()), op, ": up must have shape ",
              gate.sym_sizes(), " like gate, got ", describe(up));
}

void check_dtype(const char* name, const Tensor& t, const Tensor& gate) {
  TORCH_CHECK(t.scalar_type() == gate.scalar_type(), "gated_activation: ", name, " must be ",
              gate.scalar_type(), " like gate, got ", describe(t));
}

// The shape of gate, or of its half if it is packed.
std::vector<c10::SymInt> shape_of(const Tensor& gate, const OptionalTensor& up) {
  auto shape = gate.sym_sizes().vec();
  if (!is_defined(up)) shape.back() = shape.back() / 2;
  return shape;
}

}  // namespace

void gated_check(const GatedArguments& a) {
  const auto& limit = a.options.limit;
  const char* const op = operator_name(a.options.kind);
  check_floating(op, "gate", a.gate);
  is_defined(a.up) ? check_up(op, a.gate, *a.up) : check_packed(op, a.gate);
  TORCH_CHECK_VALUE(!limit || *limit >= 0, op, ": limit must be at least 0, got ", *limit);
}

Tensor gated_activation_outputs(const GatedArguments& a) {
  gated_check(a);
  if (is_defined(a.up)) check_dtype("up", *a.up, a.gate);
  return at::empty_symint(shape_of(a.gate, a.up), a.gate.options());
}

QuantizedRows gated_activation_quantized_outputs(const GatedQuantizedArguments& q) {
  const auto& a = q.forward;
  gated_check(a);
  if (is_defined(a.up)) check_dtype("up", *a.up, a.gate);
  return quantized_rows_outputs(operator_name(a.options.kind), a.gate, shape_of(a.gate, a.up),
                                q.format);
}

GatedGradients gated_activation_backward_outputs(const GatedBackwardArguments& a) {
  const auto& [gate, up, options] = a.forward;
  gated_check(a.forward);
  if (is_defined(up)) check_dtype("up", *up, gate);
  check_dtype("dy", a.dy, gate);
  const auto shape = shape_of(gate, up);
  TORCH_CHECK(a.dy.sym_sizes().equals(shape), "gated_activation_backward: dy must have shape ",
              c10::SymIntArrayRef(shape), " like y, got ", describe(a.dy));
  return {a.output_mask[0] ? empty_contiguous(gate) : Tensor(),
          a.output_mask[1] && is_defined(up) ? empty_contiguous(*up) : Tensor()};
}

}  // namespace fusedops::gated_activation
