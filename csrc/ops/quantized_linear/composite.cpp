// quantized_linear in ATen calls: runs if no kernel does, and in a double backward. It decodes
// the whole weight in memory.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <cmath>
#include <vector>

#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::quantized_linear {
namespace {

// The two codes of each byte: [..., b] -> [..., 2 b]
Tensor halves(const Tensor& bytes) {
  return at::stack({at::bitwise_right_shift(bytes, 4), at::bitwise_and(bytes, 15)}, -1)
      .flatten(-2, -1);
}

// Repeats t [rows, groups] for each element of the groups: [rows, n].
Tensor spread(const Tensor& t, int64_t size, const c10::SymInt& n) {
  if (t.sym_size(1) == 1) return t.expand_symint({t.sym_size(0), n});
  return t.unsqueeze(-1)
      .expand_symint({t.sym_size(0), t.sym_size(1), size})
      .flatten(1, 2)
      .narrow_symint(1, 0, n);
}

// Built with at::full, because transforms and fake tensors do not take a tensor over our own data.
Tensor nf4_table(const at::TensorOptions& options) {
  std::vector<Tensor> values;
  for (const float value : kNf4) values.push_back(at::full({1}, value, options));
  return at::cat(values);
}

Tensor nf4_values(const Tensor& qweight, const c10::SymInt& count, c10::ScalarType dtype) {
  const auto table = nf4_table(qweight.options().dtype(dtype));
  const auto codes = halves(qweight.flatten()).narrow_symint(0, 0, count);
  return table.index_select(0, codes.to(at::kInt));
}

// Returns the weight [n, k] in float32 or float64. Each element is one product of code and scale.
Tensor wide_weight(const QuantizedTensors& w, c10::ScalarType dtype) {
  const auto scales = w.scales.to(dtype);
  if (w.format == WeightFormat::nf4) {
    const auto count = w.n * w.k;
    const auto absmax = spread(scales.unsqueeze(0), kNf4Block, count).squeeze(0);
    return (nf4_values(w.qweight, count, dtype) * absmax).view_symint({w.n, w.k});
  }
  auto codes = w.qweight;
  if (w.format == WeightFormat::int4) codes = halves(codes).narrow_symint(1, 0, w.k);
  codes = codes.to(dtype);
  if (is_defined(w.zeros)) codes = codes - spread(w.zeros->to(dtype), w.group_size, w.k);
  return codes * spread(scales, w.group_size, w.k);
}

// t rounded to a dtype, in the accumulation dtype. The gradient passes through unrounded; a cast
// would round it as well.
Tensor rounded_to(const Tensor& t, c10::ScalarType dtype) {
  const auto wide = t.to(accumulation_dtype(t.scalar_type()));
  if (wide.scalar_type() == at::kDouble || dtype == at::kFloat) return wide;
  const auto change = wide.detach().to(dtype).to(at::kFloat) - wide.detach();
  return wide + change.nan_to_num(0, 0, 0);  // of infinities
}

// The dtype to which a product's operands are rounded. Sums are always float32.
c10::ScalarType operand_dtype(c10::ScalarType dtype, Compute compute) {
  if (compute == Compute::bf16) return at::kBFloat16;
  return compute == Compute::any ? dtype : at::kFloat;
}

// Each row of x quantized and dequantized: its largest number gets the largest code. A row with a
// number that is not finite becomes NaN. The gradient passes through unrounded.
Tensor rounded_rows(const Tensor& x, InputFormat format) {
  auto [codes, step] = rounded_to_codes(x.detach().to(at::kFloat), format);
  if (format == InputFormat::fp8) codes = codes.to(at::kFloat8_e4m3fn);
  const auto acc = x.to(accumulation_dtype(x.scalar_type()));
  return acc + (codes.to(acc.scalar_type()) * step - acc.detach());
}

// z, in dtype, of x in the accumulation dtype. operand: the dtype to which the weight is rounded.
Tensor wide_product(const Tensor& x, const QuantizedTensors& weight, const OptionalTensor& bias,
                    c10::ScalarType operand, c10::ScalarType dtype) {
  const auto wide = x.scalar_type();
  // 8-bit codes are exact in bfloat16. A scale per row multiplies the row's sum.
  const bool bytes = weight.format == WeightFormat::int8 || weight.format == WeightFormat::fp8;
  const bool a_scale_a_row = bytes && weight.scales.sym_size(1) == 1;
  const auto w =
      a_scale_a_row ? weight.qweight.to(wide) : rounded_to(wide_weight(weight, wide), operand);
  auto z = at::linear(x, w);
  if (a_scale_a_row) z = z * weight.scales.flatten().to(wide);
  if (is_defined(bias)) z = z + bias->to(wide);
  return z.to(dtype);
}

Tensor product_of_codes(const QuantizedArguments& a) {
  const auto dtype = a.dtype(), wide = accumulation_dtype(dtype);
  return wide_product(a.x.to(wide) * a.x_scale->to(wide), a.weight(), a.bias,
                      operand_dtype(dtype, a.compute), dtype);
}

}  // namespace

Tensor dequantized(const QuantizedTensors& weight, c10::ScalarType dtype) {
  return wide_weight(weight, accumulation_dtype(dtype)).to(dtype);
}

Tensor dequantize_weight_composite(const DequantizeArguments& a) {
  return dequantized(a.weight(), a.dtype);
}

Tensor quantized_product(const Tensor& x, const QuantizedTensors& weight,
                         const OptionalTensor& bias, InputFormat input_format, Compute compute) {
  const auto dtype = x.scalar_type();
  const auto operand = operand_dtype(dtype, compute);
  if (operand == dtype && input_format == InputFormat::none) {
    return at::linear(x, dequantized(weight, dtype), bias);
  }
  const auto a =
      input_format == InputFormat::none ? rounded_to(x, operand) : rounded_rows(x, input_format);
  return wide_product(a, weight, bias, operand, dtype);
}

QuantizedBackward quantized_gradients(const Tensor& dz, const QuantizedTensors& weight,
                                      Compute compute, std::array<bool, 2> output_mask) {
  const auto dtype = dz.scalar_type(), wide = accumulation_dtype(dtype);
  const auto operand = operand_dtype(dtype, compute == Compute::int8 ? Compute::any : compute);
  Tensor dx, dbias;
  if (output_mask[0] && operand == dtype) dx = at::matmul(dz, dequantized(weight, dtype));
  if (output_mask[0] && operand != dtype) {
    const auto w = rounded_to(wide_weight(weight, wide), operand);
    dx = at::matmul(rounded_to(dz, operand), w).to(dtype);
  }
  if (output_mask[1]) dbias = as_rows(dz).sum(0);
  return {dx, dbias};
}

QuantizedForward quantized_linear_forward_composite(const QuantizedArguments& a) {
  quantized_linear_outputs(a);
  const auto product = a.of_codes()
                           ? product_of_codes(a)
                           : quantized_product(a.x, a.weight(), a.bias, a.input_format, a.compute);
  const auto z = product.contiguous();
  return {activate(z, a.activation), a.keeps_z() ? z : Tensor()};
}

QuantizedBackward quantized_linear_backward_composite(const QuantizedBackwardArguments& a) {
  quantized_linear_backward_outputs(a);
  const auto dz = gradient_of_z(a.dy, {}, a.z, a.activation);
  return contiguous(quantized_gradients(dz, a.weight(), a.compute, a.output_mask));
}

}  // namespace fusedops::quantized_linear
