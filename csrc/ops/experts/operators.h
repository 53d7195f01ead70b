// Declares the operators of a mixture of experts. Formulas and shapes:
// fusedops/functional/experts.py.
//
// A slot is a token's choice of an expert: [tokens, k] of them. Slots sorted by expert, and by
// position for each expert, are the rows of the products. Slots whose expert is E come last and
// contribute nothing.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/experts.h"
#include "csrc/ops/linear/operators.h"
#include "csrc/ops/operator.h"
#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::experts {

using quantized_linear::Compute, quantized_linear::QuantizedCodes,
    quantized_linear::QuantizedTensors, quantized_linear::WeightFormat;

// autograd.cpp: the public operator.
Tensor experts(const Tensor& hidden, const Tensor& top_k_index, const Tensor& top_k_weights,
               const Tensor& gate_up, const Tensor& down, const OptionalTensor& gate_up_bias,
               const OptionalTensor& down_bias, std::optional<std::string_view> activation,
               bool gated, bool interleaved, bool transposed, std::optional<double> limit,
               double alpha, double up_offset);

// quantized.cpp: the same with quantized weights, which have no gradients.
Tensor quantized_experts(const Tensor& hidden, const Tensor& top_k_index,
                         const Tensor& top_k_weights, const Tensor& gate_up,
                         const Tensor& gate_up_scales, const OptionalTensor& gate_up_zeros,
                         const Tensor& down, const Tensor& down_scales,
                         const OptionalTensor& down_zeros, const OptionalTensor& gate_up_bias,
                         const OptionalTensor& down_bias, std::string_view format,
                         c10::SymInt inner, int64_t gate_up_group_size, int64_t down_group_size,
                         std::optional<std::string_view> compute,
                         std::optional<std::string_view> activation, bool gated, bool interleaved,
                         std::optional<double> limit, double alpha, double up_offset);

constexpr Names<6> names_of(Activation) {
  return {"activation", {"none", "relu", "gelu", "gelu_tanh", "silu", "relu2"}, true};
}

Activation activation_of(std::optional<std::string_view> name);

struct Options {
  Activation activation;
  bool gated, interleaved, transposed;
  std::optional<double> limit;
  double alpha, up_offset;

  static auto fields(auto& a) {
    return std::tie(a.activation, a.gated, a.interleaved, a.transposed, a.limit, a.alpha,
                    a.up_offset);
  }
};

// All have one dtype, except top_k_index (int64) and top_k_weights (any floating dtype).
struct Inputs {
  const Tensor &hidden, &top_k_index, &top_k_weights, &gate_up, &down;
  const OptionalTensor &gate_up_bias, &down_bias;
  Options options;

  static auto fields(auto& a) {
    return std::tie(a.hidden, a.top_k_index, a.top_k_weights, a.gate_up, a.down, a.gate_up_bias,
                    a.down_bias, a.options);
  }
};

// Quantized weights, each expert by itself: gate_up [E, N, H] and down [E, H, I]. They are not
// transposed.
struct QuantizedExperts {
  WeightFormat format;
  c10::SymInt inner;  // I
  int64_t gate_up_group, down_group;
  Compute compute;

  static auto fields(auto& a) {
    return std::tie(a.format, a.inner, a.gate_up_group, a.down_group, a.compute);
  }
};
struct QuantizedInputs {
  const Tensor &hidden, &top_k_index, &top_k_weights;
  QuantizedCodes gate_up, down;
  const OptionalTensor &gate_up_bias, &down_bias;
  QuantizedExperts weights;
  Options options;

  static auto fields(auto& a) {
    return std::tie(a.hidden, a.top_k_index, a.top_k_weights, a.gate_up, a.down, a.gate_up_bias,
                    a.down_bias, a.weights, a.options);
  }
};

// The arguments that float and quantized weights share. N is 2I for gated experts, else I.
struct Routed {
  const Tensor &hidden, &top_k_index, &top_k_weights;
  const OptionalTensor &gate_up_bias, &down_bias;
  const Options& options;
  c10::SymInt experts, inner;

  Routed(const Inputs& a);           // NOLINT(google-explicit-constructor)
  Routed(const QuantizedInputs& a);  // NOLINT(google-explicit-constructor)

  c10::SymInt tokens() const { return hidden.sym_size(0); }
  c10::SymInt slots() const { return top_k_index.sym_numel(); }
  c10::SymInt width() const { return hidden.sym_size(1); }
  c10::SymInt wide() const { return options.gated ? inner * 2 : inner; }
};

// The weights of quantized inputs, checked.
QuantizedTensors gate_up_of(const QuantizedInputs& a);
QuantizedTensors down_of(const QuantizedInputs& a);

// y [tokens, H]; z [tokens * k, N], the rows before the gate, undefined without keep_z.
using ExpertsForward = std::tuple<Tensor, Tensor>;
template <class AnyInputs>
struct ForwardOf {
  AnyInputs inputs;
  bool keep_z;

  static auto fields(auto& a) { return std::tie(a.inputs, a.keep_z); }
};

// Gradients of hidden, top_k_weights, gate_up, down, gate_up_bias and down_bias, contiguous; those
// not in output_mask are undefined.
using ExpertsBackward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
// Gradients of hidden, top_k_weights, gate_up_bias and down_bias.
using QuantizedExpertsBackward = std::tuple<Tensor, Tensor, Tensor, Tensor>;
template <class AnyInputs, size_t gradients>
struct BackwardOf {
  const Tensor& dy;
  AnyInputs inputs;
  const Tensor& z;
  std::array<bool, gradients> output_mask;

  static auto fields(auto& a) { return std::tie(a.dy, a.inputs, a.z, a.output_mask); }
};
using BackwardArguments = BackwardOf<Inputs, 6>;
using QuantizedBackwardArguments = BackwardOf<QuantizedInputs, 4>;

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

void experts_check(const Inputs& a);
void experts_check(const QuantizedInputs& a);
template <class AnyInputs>
ExpertsForward experts_outputs(const ForwardOf<AnyInputs>& a);
ExpertsBackward experts_backward_outputs(const BackwardArguments& a);
QuantizedExpertsBackward quantized_experts_backward_outputs(const QuantizedBackwardArguments& a);

// reference.cpp: the same by the definition, differentiable to any order.

template <class AnyInputs>
ExpertsForward experts_forward_reference(const ForwardOf<AnyInputs>& a);
ExpertsBackward experts_backward_reference(const BackwardArguments& a);
QuantizedExpertsBackward quantized_experts_backward_reference(const QuantizedBackwardArguments& a);

}  // namespace fusedops::experts
