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
#include "csrc/ops/linear/operators.h"
#include "csrc/ops/operator.h"

namespace fusedops::experts {

using linear::Activation;

// autograd.cpp: the public operator.
Tensor experts(const Tensor& hidden, const Tensor& top_k_index, const Tensor& top_k_weights,
               const Tensor& gate_up, const Tensor& down, const OptionalTensor& gate_up_bias,
               const OptionalTensor& down_bias, std::optional<std::string_view> activation,
               bool gated, bool interleaved, bool transposed, std::optional<double> limit,
               double alpha, double up_offset);

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

// The sizes that the inputs have: N is 2I for gated experts, else I.
struct Sizes {
  c10::SymInt tokens, k, experts, hidden, inner, wide;  // wide: N

  explicit Sizes(const Inputs& a);
};

// y [tokens, H]; z [tokens * k, N], the rows before the gate, undefined without keep_z.
using ExpertsForward = std::tuple<Tensor, Tensor>;
struct ForwardArguments {
  Inputs inputs;
  bool keep_z;

  static auto fields(auto& a) { return std::tie(a.inputs, a.keep_z); }
};

// Gradients of hidden, top_k_weights, gate_up, down, gate_up_bias and down_bias, contiguous; those
// not in output_mask are undefined.
using ExpertsBackward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
struct BackwardArguments {
  const Tensor& dy;
  Inputs inputs;
  const Tensor& z;
  std::array<bool, 6> output_mask;

  static auto fields(auto& a) { return std::tie(a.dy, a.inputs, a.z, a.output_mask); }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

void experts_check(const Inputs& a);
ExpertsForward experts_outputs(const ForwardArguments& a);
ExpertsBackward experts_backward_outputs(const BackwardArguments& a);

// composite.cpp: the formulas in ATen calls, differentiable to any order. The backward computes z
// anew from the inputs, so that it is differentiable too.

ExpertsForward experts_composite(const ForwardArguments& a);
ExpertsBackward experts_backward_composite(const BackwardArguments& a);

}  // namespace fusedops::experts
