// Declares quantized_linear's operators: a matmul with a quantized weight, its bias and activation,
// and quantizing and dequantizing the weight. Formats, formulas and shapes:
// fusedops/functional/quantized_linear.py.
//
// z = x w^T + bias, y = activation(z), with z rounded to x's dtype as in linear. With Compute::any
// the backend chooses the operands' dtype: bfloat16 or more accurate. Sums are float32.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/weight_formats.h"
#include "csrc/ops/linear/operators.h"
#include "csrc/ops/quantize_rows.h"

namespace fusedops::quantized_linear {

using linear::activate, linear::Activation, linear::as_rows, linear::gradient_of_z;

inline constexpr const char* kQuantizedLinear = "quantized_linear";  // in errors

constexpr Names<4> names_of(WeightFormat) { return {"format", {"int8", "int4", "nf4", "fp8"}}; }
constexpr Names<4> names_of(Compute) { return {"compute", {"any", "exact", "bf16", "int8"}, true}; }

// A weight's arguments in the schemas.
struct QuantizedCodes {
  const Tensor &qweight, &scales;
  const OptionalTensor& zeros;

  static auto fields(auto& a) { return std::tie(a.qweight, a.scales, a.zeros); }
};
struct QuantizedLayout {
  WeightFormat format;
  c10::SymInt n, k;  // out_features, in_features
  int64_t group_size;

  static auto fields(auto& a) { return std::tie(a.format, a.n, a.k, a.group_size); }
};

// A weight [n, k]: checked, contiguous tensors and how to read them.
//   int8  qweight int8 [n, k]                 scales [n, groups]    w = q s
//   int4  qweight uint8 [n, (k + 1) / 2]      scales, zeros uint8   w = (q - z) s
//   nf4   qweight uint8 [(n k + 1) / 2, 1]    scales [blocks]       w = kNf4[q] s
//   fp8   qweight float8_e4m3fn [n, k]        scales [n, 1]         w = q s
// Scales are float32; nf4's blocks are blocks of the flattened weight. The high half of a byte is
// the first of its two codes.
//
// With experts, that many weights, each quantized by itself: the tensors have a leading dimension.
struct QuantizedTensors {
  Tensor qweight, scales;
  OptionalTensor zeros;
  WeightFormat format;
  c10::SymInt n, k;
  int64_t group_size;
  std::optional<c10::SymInt> experts;

  // op and prefix: how errors name the operator and the tensors.
  QuantizedTensors(const QuantizedCodes& codes, const QuantizedLayout& layout,
                   std::optional<c10::SymInt> experts = std::nullopt,
                   const char* op = kQuantizedLinear, const std::string& prefix = "");
};

// autograd.cpp: the public operator. Only x and bias get gradients. If input_format quantizes x,
// its gradient is that of the quantized x. With x_scale [..., 1], x is codes, which have no
// gradient.
Tensor quantized_linear(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                        const OptionalTensor& zeros, const OptionalTensor& bias,
                        std::string_view format, c10::SymInt out_features, c10::SymInt in_features,
                        int64_t group_size, std::optional<std::string_view> activation,
                        std::optional<std::string_view> input_format,
                        std::optional<std::string_view> compute, const OptionalTensor& x_scale,
                        std::optional<c10::ScalarType> out_dtype);

// y [x's shape but the last, n], z [the same; undefined without an activation or keep_z]
using QuantizedForward = std::tuple<Tensor, Tensor>;
struct QuantizedArguments {
  const Tensor& x;
  QuantizedCodes codes;
  const OptionalTensor& bias;
  QuantizedLayout layout;
  Activation activation;
  InputFormat input_format;
  Compute compute;
  bool keep_z;
  const OptionalTensor& x_scale;  // if x is codes of input_format
  std::optional<c10::ScalarType> out_dtype;

  static auto fields(auto& a) {
    return std::tie(a.x, a.codes, a.bias, a.layout, a.activation, a.input_format, a.compute,
                    a.keep_z, a.x_scale, a.out_dtype);
  }
  bool x_is_codes() const { return is_defined(x_scale); }
  c10::ScalarType dtype() const { return out_dtype.value_or(x.scalar_type()); }  // y's
  bool keeps_z() const { return keep_z && activation != Activation::none; }
  QuantizedTensors weight() const { return {codes, layout}; }
};

// dx [dy's shape but the last, k], dbias [n]. Outputs not in output_mask are undefined; an
// activation needs z. compute "int8" means "any" here: dy is never quantized.
using QuantizedBackward = std::tuple<Tensor, Tensor>;
struct QuantizedBackwardArguments {
  const Tensor& dy;
  QuantizedCodes codes;
  const OptionalTensor& z;
  QuantizedLayout layout;
  Activation activation;
  Compute compute;
  std::array<bool, 2> output_mask;

  static auto fields(auto& a) {
    return std::tie(a.dy, a.codes, a.z, a.layout, a.activation, a.compute, a.output_mask);
  }
  QuantizedTensors weight() const { return {codes, layout}; }
};

// The dequantized weight, [n, k] of a floating dtype.
struct DequantizeArguments {
  QuantizedCodes codes;
  QuantizedLayout layout;
  c10::ScalarType dtype;

  static auto fields(auto& a) { return std::tie(a.codes, a.layout, a.dtype); }
  QuantizedTensors weight() const { return {codes, layout}; }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

// quantized_linear_tiles has the same arguments: csrc/cuda's forward calls it for more rows than it
// multiplies itself.
QuantizedForward quantized_linear_tiles(const QuantizedArguments& a);
QuantizedForward quantized_linear_outputs(const QuantizedArguments& a);
QuantizedBackward quantized_linear_backward_outputs(const QuantizedBackwardArguments& a);
Tensor dequantize_weight_outputs(const DequantizeArguments& a);

// Quantizes float32 groups [groups, size] to codes, scales [groups] and, for int4, zeros uint8
// [groups]. Codes are int8 or float8_e4m3fn [groups, size], 4-bit codes uint8 [groups, size / 2].
// shares: the fractions of a group's largest scale that are tried in 4 bits. Only CPUs have a
// kernel; elsewhere the reference makes the same bytes.
using QuantizedGroups = std::tuple<Tensor, Tensor, Tensor>;
QuantizedGroups quantize_groups_outputs(const Tensor& groups, std::string_view format,
                                        at::ArrayRef<double> shares);

// reference.cpp: the same by the definition, differentiable to any order.

QuantizedForward quantized_linear_forward_reference(const QuantizedArguments& a);
// Returns the gradients of x and bias, from z's.
QuantizedBackward quantized_gradients(const Tensor& dz, const QuantizedCodes& codes,
                                      const QuantizedLayout& layout, Compute compute,
                                      std::array<bool, 2> output_mask);
QuantizedBackward quantized_linear_backward_reference(const QuantizedBackwardArguments& a);
Tensor dequantize_weight_reference(const DequantizeArguments& a);

}  // namespace fusedops::quantized_linear
