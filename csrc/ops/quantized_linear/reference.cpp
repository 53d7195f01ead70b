// quantized_linear by its definition, fusedops/references/quantized_linear.py.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <vector>

#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::quantized_linear {
namespace {

// The definition's arguments for z.
struct Product {
  const QuantizedArguments& a;
  Activation activation = Activation::none;

  static auto fields(auto& p) {
    return std::tie(p.a.x, p.a.codes, p.a.bias, p.a.layout, p.activation, p.a.input_format,
                    p.a.compute, p.a.x_scale, p.a.out_dtype);
  }
};

}  // namespace

QuantizedForward quantized_linear_forward_reference(const QuantizedArguments& a) {
  quantized_linear_outputs(a);
  const auto z = call<"fusedops::quantized_linear_reference", Tensor>(Product{a}).contiguous();
  return {activate(z, a.activation), a.keeps_z() ? z : Tensor()};
}

QuantizedBackward quantized_gradients(const Tensor& dz, const QuantizedCodes& codes,
                                      const QuantizedLayout& layout, Compute compute,
                                      std::array<bool, 2> output_mask) {
  const auto dtype = dz.scalar_type();
  Tensor dx, dbias;
  if (output_mask[0]) {
    const auto operand = compute == Compute::exact ? accumulation_dtype(dtype) : dtype;
    const auto weight =
        call<"fusedops::dequantize_weight", Tensor>(DequantizeArguments{codes, layout, operand});
    dx = at::matmul(dz.to(operand), weight).to(dtype);
  }
  if (output_mask[1]) dbias = as_rows(dz).sum(0);
  return {dx, dbias};
}

QuantizedBackward quantized_linear_backward_reference(const QuantizedBackwardArguments& a) {
  quantized_linear_backward_outputs(a);
  const auto dz = gradient_of_z(a.dy, {}, a.z, a.activation);
  return contiguous(quantized_gradients(dz, a.codes, a.layout, a.compute, a.output_mask));
}

Tensor dequantize_weight_reference(const DequantizeArguments& a) {
  dequantize_weight_outputs(a);
  return call<"fusedops::dequantize_weight_reference", Tensor>(a);
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("quantized_linear_reference(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros,"
        " Tensor? bias, str format, SymInt out_features, SymInt in_features, int group_size,"
        " str activation, str input_format, str compute, Tensor? x_scale, ScalarType? out_dtype)"
        " -> Tensor",
        pure);
  m.def("dequantize_weight_reference(Tensor qweight, Tensor scales, Tensor? zeros, str format,"
        " SymInt out_features, SymInt in_features, int group_size, ScalarType dtype) -> Tensor",
        pure);
}

}  // namespace fusedops::quantized_linear
