// Declares attention's operators. Shapes and formulas: fusedops/functional/attention.py and
// csrc/kernels/attention.h.
//
// In the kernel operators q is [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], of any
// strides; with cu_seqlens B is 1 and the sequences are concatenated. `scalars` holds the options
// that are numbers, window is (left, right), -1 open. The backward needs out and lse [B, Hq, Sq],
// which includes the sink and is float64: rounding it would scale all of a row's gradients.
#pragma once

#include <algorithm>
#include <array>
#include <tuple>

#include "csrc/kernels/attention.h"
#include "csrc/ops/operator.h"
#include "csrc/common.h"

namespace fusedops::attention {

using Numbers = c10::ArrayRef<double>;
using OutAndLse = std::tuple<Tensor, Tensor>;
using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "attention";       // in messages
constexpr int64_t kWidest = int64_t{1} << 61;  // widest window; no sum of positions overflows

struct AttentionOptions {
  double scale, softcap, dropout_p;  // softcap 0: none
  int64_t left, right;               // -1: open
  bool bottom_right;                 // the last query sees the last key

  std::array<double, 3> scalars() const { return {scale, softcap, dropout_p}; }
  std::array<int64_t, 2> window() const { return {left, right}; }
  Window of(int64_t queries, int64_t keys) const {
    return {left, right, bottom_right ? keys - queries : 0};
  }
};

// autograd.cpp: the public operator. q [B, Hq, Sq, D], or [tokens, Hq, D] with cu_seqlens.
// top_left: for `causal` and `window` the first query is at the first key, as in torch.
OutAndLse attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                    at::OptionalIntArrayRef window, std::optional<double> softcap,
                    const OptionalTensor& sinks, const OptionalTensor& bias,
                    std::optional<double> scale, double dropout_p,
                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                    std::optional<c10::SymInt> max_seqlen_q,
                    std::optional<c10::SymInt> max_seqlen_k, bool top_left);

// The options of a public call, checked. packed: q is [tokens, heads, width].
AttentionOptions options_of(const Tensor& q, bool packed, bool causal,
                            at::OptionalIntArrayRef window, std::optional<double> softcap,
                            std::optional<double> scale);

// A call's input tensors.
struct AttentionInputs {
  const Tensor &q, &k, &v;
  const OptionalTensor &bias, &sinks, &cu_seqlens_q, &cu_seqlens_k, &seed;

  static auto fields(auto& a) {
    return std::tie(a.q, a.k, a.v, a.bias, a.sinks, a.cu_seqlens_q, a.cu_seqlens_k, a.seed);
  }
};

// The options in the schemas' form.
struct AttentionNumbers {
  c10::SymInt max_q, max_k;
  Numbers scalars;
  at::IntArrayRef window;
  bool bottom_right;

  static auto fields(auto& a) {
    return std::tie(a.max_q, a.max_k, a.scalars, a.window, a.bottom_right);
  }
  AttentionOptions options() const {
    return {scalars.at(0),
            scalars.at(1),
            scalars.at(2),
            std::min(window.at(0), kWidest),
            std::min(window.at(1), kWidest),
            bottom_right};
  }
};

// out [B, Hq, Sq, Dv], in memory [B, Sq, Hq, Dv], and lse [B, Hq, Sq].
struct AttentionArguments {
  AttentionInputs in;
  AttentionNumbers numbers;

  static auto fields(auto& a) { return std::tie(a.in, a.numbers); }
};

// The gradients in output_mask; the others are undefined. dq, dk and dv have out's memory layout.
struct AttentionBackwardArguments {
  const Tensor& grad;
  const OptionalTensor& grad_lse;
  AttentionInputs in;
  const Tensor &out, &lse;
  AttentionNumbers numbers;
  std::array<bool, 5> output_mask;

  static auto fields(auto& a) {
    return std::tie(a.grad, a.grad_lse, a.in, a.out, a.lse, a.numbers, a.output_mask);
  }
};

// outputs.cpp: check the arguments and allocate the outputs. Also the Meta kernels.

void attention_check(const AttentionInputs& in);
void check_group(const Tensor& q, const Tensor& k);
void check_sinks(const OptionalTensor& sinks, const Tensor& q);
void check_cu_seqlens(const char* name, const OptionalTensor& cu, const Tensor& q);
// Sequences must be adjacent, the first at 0. Checked on CPUs only: a GPU would have to be waited
// for.
void check_sequences(const char* name, const Tensor& cu_seqlens, const c10::SymInt& tokens);
OutAndLse attention_outputs(const AttentionArguments& a);
OutAndLse empty_outputs(const Tensor& q, const Tensor& v);
AttentionGradients attention_backward_outputs(const AttentionBackwardArguments& a);

// reference.cpp: the definition, with all scores in memory.

OutAndLse attention_reference(const AttentionArguments& a);

// The definition's gradients, differentiable if gradients are enabled. grad: undefined for none.
AttentionGradients attention_gradients(const Tensor& grad, const OptionalTensor& grad_lse,
                                       const AttentionArguments& a, std::array<bool, 5> needs_grad);

// The kernel operators by the definition.
OutAndLse attention_forward_reference(const AttentionArguments& a);
AttentionGradients attention_backward_reference(const AttentionBackwardArguments& a);

}  // namespace fusedops::attention
