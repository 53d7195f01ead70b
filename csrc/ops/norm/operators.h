// Declares the norm operators: LayerNorm and RMSNorm, also of a residual sum or with quantized
// output. Formulas and shapes: fusedops/functional/norm.py.
//
// They share three kernel operators, norm_forward, norm_backward and norm_quantized, in which the
// residual, the weight, the bias and the dropout are optional. Only RMSNorm has quantized output.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/norm.h"
#include "csrc/ops/operator.h"
#include "csrc/ops/quantize_rows.h"
#include "csrc/ops/seed.h"

namespace fusedops::norm {

// rms_llama rounds before it multiplies.
enum class NormKind : uint8_t { layer, rms, rms_llama };
constexpr Names<3> names_of(NormKind) { return {"kind", {"layer", "rms", "rms_llama"}}; }

// autograd.cpp: the public operators.

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps);
Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps, std::string_view rounding,
                double offset);
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, double dropout_p);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        std::string_view rounding, double offset, double dropout_p);

// The same with y as codes and scale; they have no gradient.
QuantizedRows rms_norm_quantized(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, std::optional<double> eps,
                                 std::string_view rounding, double offset,
                                 std::string_view output_format);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quantized(const Tensor& x, const Tensor& residual,
                                                          const OptionalTensor& weight,
                                                          std::optional<double> eps,
                                                          std::string_view rounding, double offset,
                                                          double dropout_p,
                                                          std::string_view output_format);

// y [x's shape], h [x's shape; undefined without a residual], stats [mean and rstd, or rstd; rows].
// stats are float64: rounded to float32, they would shift their row by up to half an ulp.
using NormForward = std::tuple<Tensor, Tensor, Tensor>;
struct NormForwardArguments {
  const Tensor& x;
  const OptionalTensor &residual, &weight, &bias;
  int64_t dims;  // the last `dims` dimensions are normalised
  double eps;
  NormKind kind;
  double offset, dropout_p;
  const OptionalTensor& seed;

  static auto fields(auto& a) {
    return std::tie(a.x, a.residual, a.weight, a.bias, a.dims, a.eps, a.kind, a.offset, a.dropout_p,
                    a.seed);
  }
};

// codes [x's shape], scale [x's shape but the last, 1], h as above. For RMSNorms of one dimension.
using NormQuantized = std::tuple<Tensor, Tensor, Tensor>;
struct NormQuantizedArguments {
  NormForwardArguments norm;
  RowFormat format;  // not none

  static auto fields(auto& a) { return std::tie(a.norm, a.format); }
};

// dresidual [h's shape], the gradient of h: of residual, and of x without dropout;
// dx [h's shape], of x with dropout; dweight; dbias. Outputs not in output_mask are undefined.
using NormBackward = std::tuple<Tensor, Tensor, Tensor, Tensor>;
struct NormBackwardArguments {
  const Tensor& dy;
  const OptionalTensor& dh;
  const Tensor& h;
  const OptionalTensor &weight, &bias;
  const Tensor& stats;
  int64_t dims;
  double eps;
  NormKind kind;
  double offset, dropout_p;
  const OptionalTensor& seed;
  std::array<bool, 4> output_mask;

  static auto fields(auto& a) {
    return std::tie(a.dy, a.dh, a.h, a.weight, a.bias, a.stats, a.dims, a.eps, a.kind, a.offset,
                    a.dropout_p, a.seed, a.output_mask);
  }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

void norm_check(const NormForwardArguments& a);
NormForward norm_outputs(const NormForwardArguments& a);
NormQuantized norm_quantized_outputs(const NormQuantizedArguments& a);

// stats, uninitialised
Tensor norm_stats(const NormForwardArguments& a);
NormBackward norm_backward_outputs(const NormBackwardArguments& a);

// Returns the dtype to which y is rounded, before rms_llama's multiplication may promote it.
c10::ScalarType norm_base_dtype(const Tensor& x, c10::ScalarType h, const OptionalTensor& weight);

// rows.cpp: builds the kernels' arguments.

// A forward's tensors as rows of n elements; not empty.
struct NormForwardTensors {
  NormForwardTensors(const NormForwardArguments& a, const NormForward& outputs);

  const NormForwardArguments& a;
  const NormForward& outputs;
  int64_t rows, n;
  Rows x, residual;  // residual in h's dtype; equal to x if there is none

  void describe(NormForwardRows& args) const;
};

// A backward's tensors as rows. dy: a.dy, possibly in another dtype.
struct NormBackwardTensors {
  NormBackwardTensors(const NormBackwardArguments& a, const Tensor& dy,
                      const NormBackward& outputs);

  const NormBackwardArguments& a;
  const NormBackward& outputs;
  int64_t rows, n;
  Rows dy, dh, h;  // dh in h's dtype; equal to h if there is none

  void describe(NormBackwardRows& args) const;
};

// reference.cpp: the kernel operators by the definition, for dtypes and devices without a kernel.

NormForward norm_forward_reference(const NormForwardArguments& a);  // stats are zeros
NormQuantized norm_quantized_reference(const NormQuantizedArguments& a);

// Differentiable if gradients are enabled. It does not read stats.
NormBackward norm_backward_reference(const NormBackwardArguments& a);

// y and h
std::tuple<Tensor, Tensor> norm_reference(const NormForwardArguments& a);

}  // namespace fusedops::norm
