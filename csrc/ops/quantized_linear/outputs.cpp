// Checks the arguments of quantized_linear, and of quantizing and dequantizing its weight, and
// allocates the outputs that kernels fill.

#include <ATen/Functions.h>

#include <string>
#include <vector>

#include "csrc/ops/checks.h"
#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::quantized_linear {
namespace {

// Checks a weight's tensors. op and prefix: how errors name the operator and the tensors.
struct Parts {
  const char* op;
  const std::string& prefix;
  const Tensor& qweight;

  void check(const Tensor& t, const char* part, c10::ScalarType dtype,
             const std::vector<c10::SymInt>& shape) const {
    const std::string name = prefix + part, like = prefix + "qweight";
    check_same_device(op, name.c_str(), t, like.c_str(), qweight);
    TORCH_CHECK(t.scalar_type() == dtype && t.sym_sizes().equals(shape), op, ": ", name,
                " must be ", describe(dtype, shape), ", got ", describe(t));
  }
};

c10::ScalarType code_dtype(const Format& format) {
  if (format.row_format == RowFormat::none) return at::kByte;
  return fusedops::code_dtype(format.row_format);
}

std::vector<c10::SymInt> with_experts(std::vector<c10::SymInt> shape, const QuantizedTensors& w) {
  if (w.experts) shape.insert(shape.begin(), *w.experts);
  return shape;
}

std::vector<c10::SymInt> code_shape(const QuantizedTensors& w, const Format& format) {
  const auto bytes = [&](const c10::SymInt& codes) {
    return format.bits == 4 ? (codes + 1) / 2 : codes;
  };
  if (format.flat) return with_experts({bytes(w.n * w.k), 1}, w);
  return with_experts({w.n, bytes(w.k)}, w);
}

std::vector<c10::SymInt> scale_shape(const QuantizedTensors& w, const Format& format) {
  const auto groups = [&](const c10::SymInt& codes) {
    return (codes + w.group_size - 1) / w.group_size;
  };
  if (format.flat) return with_experts({groups(w.n * w.k)}, w);
  return with_experts({w.n, groups(w.k)}, w);
}

void check_weight(const QuantizedTensors& w, const Parts& parts) {
  const auto format = format_of(w.format);
  const auto op = parts.op;
  TORCH_CHECK(w.n >= 0 && w.k >= 0 && w.group_size > 0, op,
              ": out_features and in_features must not be negative and group_size not below 1, "
              "got ",
              w.n, ", ", w.k, " and ", w.group_size);
  TORCH_CHECK(format.group_size == 0 || w.group_size == format.group_size, op, ": group_size of ",
              to_name(w.format), " must be ", format.group_size, ", got ", w.group_size);
  TORCH_CHECK(format.bits == 8 || w.group_size % 2 == 0, op, ": group_size of ", to_name(w.format),
              " must be even, as two codes of a group are a byte, got ", w.group_size);
  parts.check(w.qweight, "qweight", code_dtype(format), code_shape(w, format));
  parts.check(w.scales, "scales", at::kFloat, scale_shape(w, format));
  TORCH_CHECK(is_defined(w.zeros) == format.has_zeros, op, ": zeros must ",
              format.has_zeros ? "be a Tensor for " : "be None for ", to_name(w.format));
  if (is_defined(w.zeros)) parts.check(*w.zeros, "zeros", at::kByte, scale_shape(w, format));
}

void check_features(const char* name, const Tensor& t, const c10::SymInt& n,
                    const QuantizedTensors& w) {
  check_floating(kQuantizedLinear, name, t);
  check_same_device(kQuantizedLinear, name, t, "qweight", w.qweight);
  TORCH_CHECK(t.dim() > 0 && t.sym_size(-1) == n, kQuantizedLinear, ": ", name,
              " must have shape [..., ", n, "], got ", describe(t));
}

Tensor empty_rows(const Tensor& like, const c10::SymInt& n, c10::ScalarType dtype) {
  return at::empty_symint(with_last(like, n), like.options().dtype(dtype));
}

Tensor empty_rows(const Tensor& like, const c10::SymInt& n) {
  return empty_rows(like, n, like.scalar_type());
}

// x as codes, and the scale of each row.
void check_codes(const QuantizedArguments& a, const QuantizedTensors& w) {
  const auto& scale = *a.x_scale;
  const auto name = [](c10::ScalarType dtype) { return c10::getDtypeNames(dtype).first; };
  const auto codes = a.x.scalar_type(), dtype = a.dtype();
  TORCH_CHECK(codes == at::kChar || codes == at::kFloat8_e4m3fn, kQuantizedLinear,
              ": codes must be int8 or float8_e4m3fn, got ", describe(a.x));
  TORCH_CHECK_VALUE(a.input_format != InputFormat::none &&
                        codes == fusedops::code_dtype(a.input_format),
                    kQuantizedLinear, ": input_format must be None or that of the codes, ",
                    codes == at::kChar ? "'int8'" : "'fp8'", ", got '", to_name(a.input_format),
                    "'");
  check_same_device(kQuantizedLinear, "codes", a.x, "qweight", w.qweight);
  TORCH_CHECK(a.x.dim() > 0 && a.x.sym_size(-1) == w.k, kQuantizedLinear,
              ": codes must have shape [..., ", w.k, "], got ", describe(a.x));
  check_same_device(kQuantizedLinear, "scale", scale, "codes", a.x);
  const auto shape = with_last(a.x, 1);
  TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.sym_sizes().equals(shape),
              kQuantizedLinear, ": scale must be ", describe(at::kFloat, shape),
              ", a number for each row of the codes, got ", describe(scale));
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
                  dtype == at::kDouble,
              kQuantizedLinear, ": out_dtype must be float32, float16, bfloat16 or float64, got ",
              name(dtype));
  if (!is_defined(a.bias)) return;
  check_same_device(kQuantizedLinear, "bias", *a.bias, "codes", a.x);
  TORCH_CHECK(a.bias->scalar_type() == dtype, kQuantizedLinear, ": bias must be ",
              describe(dtype, a.bias->sym_sizes()), " like the output, got ", describe(*a.bias));
}

void check_floats(const QuantizedArguments& a, const QuantizedTensors& w) {
  check_features("x", a.x, w.k, w);
  TORCH_CHECK(a.dtype() == a.x.scalar_type(), kQuantizedLinear,
              ": out_dtype must be x's dtype or None unless x is codes, got ",
              c10::getDtypeNames(a.dtype()).first);
  if (is_defined(a.bias)) check_like(kQuantizedLinear, "bias", *a.bias, "x", a.x);
}

// Integer matmuls need integers on both sides.
void check_operands(const QuantizedTensors& weight, InputFormat input_format, Compute compute) {
  if (compute != Compute::int8) return;
  TORCH_CHECK_VALUE(input_format == InputFormat::int8, kQuantizedLinear,
                    ": compute='int8' multiplies codes: it needs input_format='int8'");
  TORCH_CHECK_VALUE(format_of(weight.format).integers, kQuantizedLinear,
                    ": compute='int8' needs a weight of integers, int8 or int4");
}

}  // namespace

QuantizedTensors::QuantizedTensors(const QuantizedCodes& codes, const QuantizedLayout& layout,
                                   std::optional<c10::SymInt> experts_, const char* op,
                                   const std::string& prefix)
    : qweight(codes.qweight.contiguous()),
      scales(codes.scales.contiguous()),
      zeros(is_defined(codes.zeros) ? OptionalTensor(codes.zeros->contiguous()) : std::nullopt),
      format(layout.format),
      n(layout.n),
      k(layout.k),
      group_size(layout.group_size),
      experts(std::move(experts_)) {
  check_weight(*this, {op, prefix, qweight});
}

QuantizedForward quantized_linear_outputs(const QuantizedArguments& a) {
  const auto weight = a.weight();
  check_operands(weight, a.input_format, a.compute);
  a.x_is_codes() ? check_codes(a, weight) : check_floats(a, weight);
  if (is_defined(a.bias)) check_shape(kQuantizedLinear, "bias", *a.bias, {weight.n});
  const auto dtype = a.dtype();
  return {empty_rows(a.x, weight.n, dtype),
          a.keeps_z() ? empty_rows(a.x, weight.n, dtype) : Tensor()};
}

QuantizedBackward quantized_linear_backward_outputs(const QuantizedBackwardArguments& a) {
  const auto weight = a.weight();
  check_features("dy", a.dy, weight.n, weight);
  TORCH_CHECK(a.activation == Activation::none || is_defined(a.z), kQuantizedLinear,
              ": the gradient of an activation needs z");
  if (is_defined(a.z)) {
    check_like(kQuantizedLinear, "z", *a.z, "dy", a.dy);
    check_shape(kQuantizedLinear, "z", *a.z, a.dy.sym_sizes().vec());
  }
  return {a.output_mask[0] ? empty_rows(a.dy, weight.k) : Tensor(),
          a.output_mask[1] ? at::empty_symint({weight.n}, a.dy.options()) : Tensor()};
}

Tensor dequantize_weight_outputs(const DequantizeArguments& a) {
  const auto weight = a.weight();
  TORCH_CHECK(at::isFloatingType(a.dtype), "dequantize_weight: dtype must be a floating one, got ",
              c10::getDtypeNames(a.dtype).first);
  return at::empty_symint({weight.n, weight.k}, weight.qweight.options().dtype(a.dtype));
}

QuantizedGroups quantize_groups_outputs(const Tensor& groups, std::string_view format,
                                        at::ArrayRef<double> shares) {
  constexpr const char* op = "quantize_groups";
  const auto kind = format_of(from_name<WeightFormat>(op, format));
  const bool four_bits = kind.bits == 4;
  TORCH_CHECK(groups.scalar_type() == at::kFloat && groups.dim() == 2, op,
              ": groups must be float32 [groups, size], got ", describe(groups));
  const auto size = groups.sym_size(1);
  TORCH_CHECK(!four_bits || size == 32 || size == 64 || size == 128, op,
              ": size must be 32, 64 or 128, got ", size);
  TORCH_CHECK(size > 0, op, ": size must be 1 or more, got ", size);
  TORCH_CHECK(!shares.empty(), op, ": shares must not be empty");
  const auto count = groups.sym_size(0);
  const auto bytes = groups.options().dtype(at::kByte);
  const auto codes = groups.options().dtype(code_dtype(kind));
  return {at::empty_symint({count, four_bits ? size / 2 : size}, codes),
          at::empty_symint({count}, groups.options()),
          kind.has_zeros ? at::empty_symint({count}, bytes) : Tensor()};
}

}  // namespace fusedops::quantized_linear
