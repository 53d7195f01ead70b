// Gated activations: swiglu and geglu. Formulas and shapes:
// fusedops/functional/gated_activation.py.
//
// Both share one pair of kernel operators, whose `kind` is "swiglu", "geglu" or "geglu_tanh".
// Without up, gate is packed: gate and up lie side by side in its last dimension.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/kernels/gated_activation.h"

namespace fusedops {

// autograd.cpp: the public operators.

Tensor swiglu(const Tensor& gate, const OptionalTensor& up, std::optional<double> limit,
              double alpha, double up_offset);
Tensor geglu(const Tensor& gate, const OptionalTensor& up, std::string_view approximate);

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels. The kernels take
// tensors of one dtype: the public operators have converted them.

GatedKind gated_kind(std::string_view kind, std::optional<double> limit);

void gated_check(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
                 std::optional<double> limit);

// y [up's shape], contiguous
Tensor gated_activation_outputs(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
                                std::optional<double> limit, double alpha, double up_offset);

// dgate [gate's shape, packed as gate is]; dup [up's shape]. What output_mask leaves out, and the
// dup of a packed gate, is undefined.
using GatedGradients = std::tuple<Tensor, Tensor>;
GatedGradients gated_activation_backward_outputs(const Tensor& dy, const Tensor& gate,
                                                 const OptionalTensor& up, std::string_view kind,
                                                 std::optional<double> limit, double alpha,
                                                 double up_offset, std::array<bool, 2> output_mask);

// rows.cpp: what the kernels are told.

// gate and up as rows of n elements; neither is empty.
struct GatedRows {
  GatedRows(const Tensor& gate, const OptionalTensor& up);

  bool packed;
  int64_t n, rows;
  Rows gate, up;

  GatedForward forward(const Tensor& y, GatedKind kind, std::optional<double> limit, double alpha,
                       double up_offset) const;
  // dy: the rows of dy
  GatedBackward backward(const Rows& dy, const GatedGradients& gradients, GatedKind kind,
                         std::optional<double> limit, double alpha, double up_offset) const;

 private:
  void describe(GatedInput& input, GatedKind kind, std::optional<double> limit, double alpha,
                double up_offset) const;
};

// composite.cpp: the formulas in ATen calls, differentiable to any order.

Tensor gated_activation_composite(const Tensor& gate, const OptionalTensor& up,
                                  std::string_view kind, std::optional<double> limit, double alpha,
                                  double up_offset);
GatedGradients gated_activation_backward_composite(const Tensor& dy, const Tensor& gate,
                                                   const OptionalTensor& up, std::string_view kind,
                                                   std::optional<double> limit, double alpha,
                                                   double up_offset,
                                                   std::array<bool, 2> output_mask);

}  // namespace fusedops
