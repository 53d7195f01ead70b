// Attention. Shapes and formulas: fusedops/functional/attention.py and csrc/kernels/attention.h.
//
// In the kernel operators q is [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], of any
// strides; with cu_seqlens B is 1 and the sequences lie one after another. `how` has the options
// that are numbers, window is (left, right), -1 open. Kept for the backward are out and lse
// [B, Hq, Sq], float64 (a rounding of it would be one of all of a row's gradients), with the sink.
#pragma once

#include <algorithm>
#include <array>
#include <tuple>

#include "csrc/kernels/attention.h"
#include "csrc/common.h"

namespace fusedops {

using Numbers = c10::ArrayRef<double>;
using OutAndLse = std::tuple<Tensor, Tensor>;
using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr int64_t kWidest = int64_t{1} << 61;  // of a window: no sum of places overflows

struct AttentionOptions {
  double scale, softcap, dropout_p;  // softcap 0: none
  int64_t left, right;               // -1: open
  bool bottom_right;                 // the last query sees the last key

  AttentionOptions() = default;
  AttentionOptions(double scale, double softcap, double dropout_p, int64_t left, int64_t right,
                   bool bottom_right)
      : scale(scale),
        softcap(softcap),
        dropout_p(dropout_p),
        left(std::min(left, kWidest)),
        right(std::min(right, kWidest)),
        bottom_right(bottom_right) {}
  // Those of a kernel operator.
  AttentionOptions(Numbers how, at::IntArrayRef window, bool bottom_right)
      : AttentionOptions(how.at(0), how.at(1), how.at(2), window.at(0), window.at(1),
                         bottom_right) {}

  std::array<double, 3> how() const { return {scale, softcap, dropout_p}; }
  std::array<int64_t, 2> window() const { return {left, right}; }
  Window of(int64_t queries, int64_t keys) const {
    return {left, right, bottom_right ? keys - queries : 0};
  }
};

// autograd.cpp: the public operator. q [B, Hq, Sq, D], or [tokens, Hq, D] with cu_seqlens.
// top_left: the first query of `causal` and `window` is at the first key, as in torch's.
OutAndLse attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                    at::OptionalIntArrayRef window, std::optional<double> softcap,
                    const OptionalTensor& sinks, const OptionalTensor& bias,
                    std::optional<double> scale, double dropout_p,
                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                    std::optional<c10::SymInt> max_seqlen_q,
                    std::optional<c10::SymInt> max_seqlen_k, bool top_left);

// outputs.cpp: check the arguments and make the outputs. Also the Meta kernels.

void attention_check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                     const OptionalTensor& sinks, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k);

// out [B, Hq, Sq, Dv], which lies in memory as [B, Sq, Hq, Dv], and lse [B, Hq, Sq].
OutAndLse attention_outputs(const Tensor& q, const Tensor& k, const Tensor& v,
                            const OptionalTensor& bias, const OptionalTensor& sinks,
                            const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                            const OptionalTensor& seed, c10::SymInt max_q, c10::SymInt max_k,
                            Numbers how, at::IntArrayRef window, bool bottom_right);

// The gradients that were asked for; the others are undefined. Those of q, k and v lie in memory as
// out does.
AttentionGradients attention_backward_outputs(
    const Tensor& grad, const OptionalTensor& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const OptionalTensor& bias, const OptionalTensor& sinks,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seed, const Tensor& out, const Tensor& lse, c10::SymInt max_q,
    c10::SymInt max_k, Numbers how, at::IntArrayRef window, bool bottom_right,
    std::array<bool, 5> output_mask);

// composite.cpp: the formulas in ATen calls, differentiable to any order, with all scores in
// memory.

OutAndLse attention_formula(const Tensor& q, const Tensor& k, const Tensor& v,
                            const OptionalTensor& bias, const OptionalTensor& sinks,
                            const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                            const OptionalTensor& seed, const AttentionOptions& options);

AttentionGradients attention_gradients(const Tensor& grad, const OptionalTensor& grad_lse,
                                       const Tensor& q, const Tensor& k, const Tensor& v,
                                       const OptionalTensor& bias, const OptionalTensor& sinks,
                                       const OptionalTensor& cu_seqlens_q,
                                       const OptionalTensor& cu_seqlens_k,
                                       const OptionalTensor& seed, const AttentionOptions& options,
                                       std::array<bool, 5> output_mask);

// As the kernel operators.
OutAndLse attention_composite(const Tensor& q, const Tensor& k, const Tensor& v,
                              const OptionalTensor& bias, const OptionalTensor& sinks,
                              const OptionalTensor& cu_seqlens_q,
                              const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed,
                              c10::SymInt max_q, c10::SymInt max_k, Numbers how,
                              at::IntArrayRef window, bool bottom_right);
AttentionGradients attention_backward_composite(
    const Tensor& grad, const OptionalTensor& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const OptionalTensor& bias, const OptionalTensor& sinks,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seed, const Tensor& out, const Tensor& lse, c10::SymInt max_q,
    c10::SymInt max_k, Numbers how, at::IntArrayRef window, bool bottom_right,
    std::array<bool, 5> output_mask);

}  // namespace fusedops
