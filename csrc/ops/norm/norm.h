// The norm family: layer_norm, rms_norm, add_layer_norm, add_rms_norm. Formulas and shapes:
// fusedops/functional/norm.py.
//
// The four share one pair of kernel operators, norm_forward and norm_backward, in which the
// residual, the weight, the bias and the dropout are optional: a backend implements two functions.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "csrc/common.h"
#include "csrc/norm.h"
#include "csrc/ops/dropout.h"

namespace fusedops {

enum class NormKind { layer, rms, rms_llama };  // rms_llama rounds before it multiplies

NormKind norm_kind(std::string_view kind);

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

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

void norm_check(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                const OptionalTensor& bias, int64_t dims, NormKind kind, double dropout_p,
                const OptionalTensor& seed);

// y [x's shape], h [x's shape; undefined without a residual], stats [mean and rstd, or rstd; rows].
// stats are float64: rounded to float32, they would shift their row by up to half an ulp.
using NormForward = std::tuple<Tensor, Tensor, Tensor>;
NormForward norm_outputs(const Tensor& x, const OptionalTensor& residual,
                         const OptionalTensor& weight, const OptionalTensor& bias, int64_t dims,
                         double eps, std::string_view kind, double offset, double dropout_p,
                         const OptionalTensor& seed);

// dresidual [h's shape], the gradient of h: of residual, and of x without dropout;
// dx [h's shape], of x with dropout; dweight; dbias. What output_mask leaves out is undefined.
using NormBackward = std::tuple<Tensor, Tensor, Tensor, Tensor>;
NormBackward norm_backward_outputs(const Tensor& dy, const OptionalTensor& dh, const Tensor& h,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   const Tensor& stats, int64_t dims, std::string_view kind,
                                   double offset, double dropout_p, const OptionalTensor& seed,
                                   std::array<bool, 4> output_mask);

// The dtype to which y is rounded, before rms_llama's product may promote it.
c10::ScalarType norm_base_dtype(const Tensor& x, c10::ScalarType h, const OptionalTensor& weight);

// rows.cpp: what the kernels are told.

// The tensors of a forward as rows of n elements; not empty.
struct NormForwardTensors {
  NormForwardTensors(const Tensor& x, const OptionalTensor& residual, const NormForward& outputs);

  const NormForward& outputs;
  int64_t rows, n;
  Rows x, residual;  // residual in h's dtype; x again without one

  void describe(NormForwardRows& args, const OptionalTensor& weight, double eps,
                std::string_view kind, double dropout_p, const OptionalTensor& seed) const;
};

// The same of a backward.
struct NormBackwardTensors {
  NormBackwardTensors(const Tensor& dy, const OptionalTensor& dh, const Tensor& h,
                      const Tensor& stats, const NormBackward& outputs);

  const NormBackward& outputs;
  const Tensor& stats;
  int64_t rows, n;
  Rows dy, dh, h;  // dh in h's dtype
  bool adds;       // dh; without one, dh is h again

  void describe(NormBackwardRows& args, double dropout_p, const OptionalTensor& seed) const;
};

// composite.cpp: the formulas in ATen calls, differentiable to any order.

// x with a share p of its elements dropped, by the mask of `dropout_reference`.
Tensor norm_dropout(const Tensor& x, double p, const OptionalTensor& seed, int64_t dims);

struct NormComposite {
  Tensor y, h, mean, rstd;  // mean and rstd keep their axes; RMSNorm has no mean
};
NormComposite norm_composite(const Tensor& x, const OptionalTensor& residual,
                             const OptionalTensor& weight, const OptionalTensor& bias, int64_t dims,
                             double eps, NormKind kind, double offset, double dropout_p,
                             const OptionalTensor& seed);

// h as what sums are made of: float32, or float64 for a float64 h
Tensor norm_accumulator(const Tensor& h);

// mean (undefined for RMSNorm) and rstd, with their axes kept
std::pair<Tensor, Tensor> norm_statistics(const Tensor& acc, int64_t dims, double eps,
                                          NormKind kind);

struct NormGradients {
  Tensor dresidual, dx, dweight, dbias;  // undefined where output_mask says so
};
NormGradients norm_gradients(const Tensor& dy, const OptionalTensor& dh, const Tensor& acc,
                             c10::ScalarType h, const OptionalTensor& weight,
                             const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd,
                             int64_t dims, double offset, double dropout_p,
                             const OptionalTensor& seed, std::array<bool, 4> output_mask);

// norm_forward and norm_backward by these formulas, for dtypes and devices without a kernel.
NormForward norm_forward_composite(const Tensor& x, const OptionalTensor& residual,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   int64_t dims, double eps, std::string_view kind, double offset,
                                   double dropout_p, const OptionalTensor& seed);
NormBackward norm_backward_composite(const Tensor& dy, const OptionalTensor& dh, const Tensor& h,
                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                     const Tensor& stats, int64_t dims, std::string_view kind,
                                     double offset, double dropout_p, const OptionalTensor& seed,
                                     std::array<bool, 4> output_mask);

}  // namespace fusedops
