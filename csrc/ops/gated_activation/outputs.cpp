// Checks of the arguments, and the outputs that the kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/gated_activation/operators.h"

namespace fusedops {
namespace {

const char* operator_name(std::string_view kind) { return kind == "swiglu" ? "swiglu" : "geglu"; }

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

// The shape of one of gate and up.
std::vector<c10::SymInt> shape_of(const Tensor& gate, const OptionalTensor& up) {
  auto shape = gate.sym_sizes().vec();
  if (!given(up)) shape.back() = shape.back() / 2;
  return shape;
}

}  // namespace

GatedKind gated_kind(std::string_view kind, std::optional<double> limit) {
  if (kind == "swiglu") return limit.has_value() ? GatedKind::swiglu_limited : GatedKind::swiglu;
  if (kind == "geglu") return GatedKind::geglu;
  TORCH_INTERNAL_ASSERT(kind == "geglu_tanh", "gated activation ", kind);
  return GatedKind::geglu_tanh;
}

void gated_check(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
                 std::optional<double> limit) {
  const char* const op = operator_name(kind);
  check_floating(op, "gate", gate);
  given(up) ? check_up(op, gate, *up) : check_packed(op, gate);
  TORCH_CHECK_VALUE(!limit.has_value() || *limit >= 0, op, ": limit must be at least 0, got ",
                    *limit);
}

Tensor gated_activation_outputs(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
                                std::optional<double> limit, double, double) {
  gated_check(gate, up, kind, limit);
  if (given(up)) check_dtype("up", *up, gate);
  return at::empty_symint(shape_of(gate, up), gate.options());
}

GatedGradients gated_activation_backward_outputs(const Tensor& dy, const Tensor& gate,
                                                 const OptionalTensor& up, std::string_view kind,
                                                 std::optional<double> limit, double, double,
                                                 std::array<bool, 2> output_mask) {
  gated_check(gate, up, kind, limit);
  if (given(up)) check_dtype("up", *up, gate);
  check_dtype("dy", dy, gate);
  const auto shape = shape_of(gate, up);
  TORCH_CHECK(dy.sym_sizes().equals(shape), "gated_activation_backward: dy must have shape ",
              c10::SymIntArrayRef(shape), " like y, got ", describe(dy));
  return {output_mask[0] ? empty_contiguous(gate) : Tensor(),
          output_mask[1] && given(up) ? empty_contiguous(*up) : Tensor()};
}

}  // namespace fusedops
