// Declares the gated activations' operators: swiglu, geglu and a swiglu with quantized output.
// Formulas and shapes: fusedops/functional/gated_activation.py.
//
// They share kernel operators, whose `kind` is "swiglu", "geglu" or "geglu_tanh". With a limit the
// kernels take a swiglu as swiglu_limited.
// Without up, gate is packed: its last dimension holds gate and up side by side.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/gated_activation.h"
#include "csrc/ops/operator.h"
#include "csrc/ops/quantize_rows.h"

namespace fusedops::gated_activation {

// autograd.cpp: the public operators.

Tensor swiglu(const Tensor& gate, const OptionalTensor& up, std::optional<double> limit,
              double alpha, double up_offset);
Tensor geglu(const Tensor& gate, const OptionalTensor& up, std::string_view approximate);

// swiglu with y as codes and scale; they have no gradient.
QuantizedRows swiglu_quantized(const Tensor& gate, const OptionalTensor& up,
                               std::optional<double> limit, double alpha, double up_offset,
                               std::string_view output_format);

constexpr Names<4> names_of(GatedKind) {
  return {"kind", {"swiglu", "swiglu", "geglu", "geglu_tanh"}};
}

struct GatedOptions {
  GatedKind kind;
  std::optional<double> limit;
  double alpha, up_offset;

  static auto fields(auto& a) { return std::tie(a.kind, a.limit, a.alpha, a.up_offset); }
};

// y [up's shape], contiguous. The kernels take tensors of one dtype; the public operators convert.
struct GatedArguments {
  const Tensor& gate;
  const OptionalTensor& up;
  GatedOptions options;

  static auto fields(auto& a) { return std::tie(a.gate, a.up, a.options); }
};

// codes [up's shape], scale [up's shape but the last, 1]
struct GatedQuantizedArguments {
  GatedArguments forward;
  RowFormat format;  // not none

  static auto fields(auto& a) { return std::tie(a.forward, a.format); }
};

// dgate [gate's shape, packed as gate is]; dup [up's shape]. Outputs not in output_mask are
// undefined, and so is dup for a packed gate.
using GatedGradients = std::tuple<Tensor, Tensor>;
struct GatedBackwardArguments {
  const Tensor& dy;
  GatedArguments forward;
  std::array<bool, 2> output_mask;

  static auto fields(auto& a) { return std::tie(a.dy, a.forward, a.output_mask); }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

void gated_check(const GatedArguments& a);
Tensor gated_activation_outputs(const GatedArguments& a);
QuantizedRows gated_activation_quantized_outputs(const GatedQuantizedArguments& a);
GatedGradients gated_activation_backward_outputs(const GatedBackwardArguments& a);

// rows.cpp: builds the kernels' arguments.

// gate and up as rows of n elements; neither is empty.
struct GatedRows {
  explicit GatedRows(const GatedArguments& a);

  const GatedArguments& a;
  bool packed;
  int64_t n, rows;
  Rows gate, up;

  GatedForward forward(const Tensor& y) const;
  // y: float32, for a row at a time; the caller sets it.
  GatedForward by_row() const;
  // dy: dy's rows.
  GatedBackward backward(const Rows& dy, const GatedGradients& gradients) const;

 private:
  void describe(GatedInput& input) const;
};

// reference.cpp: the kernel operators by the definition, for dtypes and devices without a kernel.

Tensor gated_activation_reference(const GatedArguments& a);
QuantizedRows gated_activation_quantized_reference(const GatedQuantizedArguments& a);

// Differentiable if gradients are enabled.
GatedGradients gated_activation_backward_reference(const GatedBackwardArguments& a);

}  // namespace fusedops::gated_activation
