// Gated activations in ATen calls: runs if no kernel does, and in a double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/TracerMode.h>

#include <cmath>

#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::gated_activation {
namespace {

// gate and up, unpacked, in the dtype of the formulas.
struct Halves {
  Tensor gate, up;

  Halves(const Tensor& gate_, const OptionalTensor& up_) {
    const auto wide = accumulation_dtype(gate_.scalar_type());
    gate = gate_.to(wide);  // only once: otherwise the backward would round its parts separately
    if (is_defined(up_)) {
      up = up_->to(wide);
    } else {
      up = gate.chunk(2, -1)[1];
      gate = gate.chunk(2, -1)[0];
    }
  }
};

// gate and up after the limit and the offset: the product's g and u + offset.
Halves limited(const Halves& raw, std::optional<double> limit, double up_offset) {
  auto found = raw;
  if (limit.has_value()) {
    found.gate = raw.gate.clamp(std::nullopt, *limit);
    found.up = raw.up.clamp(-*limit, *limit);
  }
  if (up_offset != 0) found.up = found.up + up_offset;
  return found;
}

// S(g) and S'(g) of csrc/kernels/gated_activation.h
struct Gate {
  Tensor value, slope;
};

// The normal distribution's share below g. ONNX has no erfc, so a trace uses erf.
Tensor normal_below(const Tensor& g) {
  if (at::tracer::impl::is_dispatch_enabled()) return (at::erf(g * std::sqrt(0.5)) + 1) * 0.5;
  return at::erfc(g * -std::sqrt(0.5)) * 0.5;
}

Tensor value_of(const Tensor& g, GatedKind kind, double alpha) {
  switch (kind) {
    case GatedKind::geglu: return normal_below(g);
    case GatedKind::geglu_tanh: return (g * (1 + kTanhCubic * g.square()) * kTanhSlope).sigmoid();
    default: return (alpha * g).sigmoid();
  }
}

Tensor slope_of(const Tensor& g, const Tensor& value, GatedKind kind, double alpha) {
  if (kind == GatedKind::geglu) return (g.square() * -0.5).exp() * kDensity;
  // value (1 - value), with a derivative that does not cancel
  const auto by_argument = at::sigmoid_backward(at::ones_like(value), value);
  if (kind != GatedKind::geglu_tanh) return by_argument * alpha;
  return by_argument * ((1 + 3 * kTanhCubic * g.square()) * kTanhSlope);
}

// y in the dtype of the formulas.
Tensor wide_product(const GatedArguments& a) {
  const auto& [kind, limit, alpha, up_offset] = a.options;
  const auto [g, u] = limited(Halves(a.gate, a.up), limit, up_offset);
  return g * value_of(g, kind, alpha) * u;
}

}  // namespace

Tensor gated_activation_composite(const GatedArguments& a) {
  gated_check(a);
  return wide_product(a).to(a.gate.scalar_type()).contiguous();
}

QuantizedRows gated_activation_quantized_composite(const GatedQuantizedArguments& a) {
  gated_activation_quantized_outputs(a);
  return quantized_rows(wide_product(a.forward), a.format);
}

GatedGradients gated_activation_backward_composite(const GatedBackwardArguments& a) {
  const auto& [gate, up, options] = a.forward;
  const auto& [kind, limit, alpha, up_offset] = options;
  const auto& output_mask = a.output_mask;
  const Halves raw(gate, up);
  const auto [g, u] = limited(raw, limit, up_offset);
  const auto d = a.dy.to(g.scalar_type());
  const auto value = value_of(g, kind, alpha);
  Tensor dgate, dup;
  if (output_mask[0]) {
    dgate = d * u * (value + g * slope_of(g, value, kind, alpha));
    if (limit.has_value()) dgate = at::where(raw.gate.le(*limit), dgate, 0.0);
  }
  if (output_mask[0] || output_mask[1]) {
    dup = d * (g * value);
    if (limit.has_value()) dup = at::where(raw.up.abs().le(*limit), dup, 0.0);
  }
  if (!is_defined(up)) {
    if (!output_mask[0]) return {};
    return {at::cat({dgate, dup}, -1).to(gate.scalar_type()).contiguous(), Tensor()};
  }
  return {output_mask[0] ? dgate.to(gate.scalar_type()).contiguous() : Tensor(),
          output_mask[1] ? dup.to(up->scalar_type()).contiguous() : Tensor()};
}

}  // namespace fusedops::gated_activation
