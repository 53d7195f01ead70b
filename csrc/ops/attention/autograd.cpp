// Attention's operators: schemas, autograd, autocast, and the choice between kernels and the
// definition.

#include <ATen/Functions.h>

#include <cmath>

#include "csrc/ops/attention/operators.h"
#include "csrc/ops/autograd.h"
#include "csrc/ops/seed.h"

namespace fusedops::attention {
namespace {

// max_seqlen_q and max_seqlen_k of a call; 0 if not given.
struct Longest {
  c10::SymInt q, k;
};

OutAndLse forward(const AttentionArguments& a) {
  return below_autograd([&] { return call<"fusedops::attention_forward", OutAndLse>(a); });
}

// Saves no scores: the backward recomputes them.
struct AttentionNode {
  static constexpr const char* kName = "FusedAttentionBackward";
  static constexpr size_t kInputs = 5;  // q, k, v, bias, sinks: the first saved tensors
  enum : size_t { kOut = kInputs, kLse, kCuSeqlensQ, kCuSeqlensK, kSeed, kSaved };

  Longest longest;
  AttentionOptions options;

  static auto fields(auto& a) {
    auto& o = a.options;
    return std::tie(a.longest.q, a.longest.k, o.scale, o.softcap, o.dropout_p, o.left, o.right,
                    o.bottom_right);
  }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 5> needs_grad) const {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(kInputs);
    const auto q = saved[0], k = saved[1], v = saved[2];
    const auto bias = optional(saved[3]), sinks = optional(saved[4]);
    const auto cu_seqlens_q = optional(saved[kCuSeqlensQ]),
               cu_seqlens_k = optional(saved[kCuSeqlensK]);
    const auto seed = optional(saved[kSeed]), grad_lse = optional(grads[1]);
    const AttentionInputs in{q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed};
    const auto scalars = options.scalars();
    const auto window = options.window();
    const AttentionNumbers numbers{longest.q, longest.k, scalars, window, options.bottom_right};
    const auto [dq, dk, dv, dbias, dsinks] = [&] {
      if (at::GradMode::is_enabled()) {  // double backward: of the definition
        return attention_gradients(grads[0], grad_lse, {in, numbers}, needs_grad);
      }
      const auto out = saved[kOut], lse = saved[kLse];
      const auto grad = grads[0].defined() ? grads[0] : at::zeros_like(out);
      return call<"fusedops::attention_backward", AttentionGradients>(
          AttentionBackwardArguments{grad, grad_lse, in, out, lse, numbers, needs_grad});
    }();
    return {dq, dk, dv, dbias, dsinks};
  }
};

OutAndLse with_gradient(const AttentionArguments& a) {
  const auto& in = a.in;
  const auto node = node_of<FusedNode<AttentionNode>>(in.q, in.k, in.v, in.bias, in.sinks);
  const auto outputs = forward(a);
  const auto& [out, lse] = outputs;
  torch::autograd::set_history(variable_list{out, lse}, node);
  node->backward = {{a.numbers.max_q, a.numbers.max_k}, a.numbers.options()};
  const auto offsets = [](const OptionalTensor& t) {
    return saved(is_defined(t) && t->is_inference() ? t->clone() : t);
  };
  node->saved = {saved(in.q),
                 saved(in.k),
                 saved(in.v),
                 saved(in.bias),
                 saved(in.sinks),
                 SavedVariable(out, true),
                 SavedVariable(lse, true),
                 offsets(in.cu_seqlens_q),
                 offsets(in.cu_seqlens_k),
                 saved(in.seed)};
  return outputs;
}

OutAndLse run(const AttentionInputs& in, const Longest& longest, const AttentionOptions& options) {
  const auto scalars = options.scalars();
  const auto window = options.window();
  const AttentionArguments a{in, {longest.q, longest.k, scalars, window, options.bottom_right}};
  if (needs_composite({in.q, in.k, in.v, in.bias, in.sinks})) return attention_reference(a);
  if (needs_gradient({in.q, in.k, in.v, in.bias, in.sinks})) return with_gradient(a);
  return forward(a);
}

}  // namespace

AttentionOptions options_of(const Tensor& q, bool packed, bool causal,
                            at::OptionalIntArrayRef window, std::optional<double> softcap,
                            std::optional<double> scale) {
  TORCH_CHECK(q.dim() == (packed ? 3 : 4), "attention: q must be ",
              packed ? "[tokens, heads, width] with cu_seqlens"
                     : "[batch, heads, queries, width] without cu_seqlens",
              ", got ", describe(q));
  TORCH_CHECK_VALUE(!softcap || (*softcap > 0 && std::isfinite(*softcap)),
                    "attention: softcap must be above 0 and finite, got ", softcap.value_or(0));
  TORCH_CHECK_VALUE(!window || (window->size() == 2 && window->at(0) >= -1 && window->at(1) >= -1),
                    "attention: window must be (left, right), each -1 (open) or more, got ",
                    window ? *window : at::IntArrayRef());
  const int64_t left = window ? std::min(window->at(0), kWidest) : -1,
                right = window ? std::min(window->at(1), kWidest) : -1;
  const double by_width = 1 / std::sqrt(q.sym_size(-1).guard_int(__FILE__, __LINE__));
  return {scale.value_or(by_width), softcap.value_or(0), 0, left, causal ? 0 : right, true};
}

OutAndLse attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                    at::OptionalIntArrayRef window, std::optional<double> softcap,
                    const OptionalTensor& sinks, const OptionalTensor& bias,
                    std::optional<double> scale, double dropout_p,
                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                    std::optional<c10::SymInt> max_seqlen_q,
                    std::optional<c10::SymInt> max_seqlen_k, bool top_left) {
  const bool varlen = is_defined(cu_seqlens_q) || is_defined(cu_seqlens_k);
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1,
                    "attention: dropout_p must be from 0 to 1, got ", dropout_p);
  auto options = options_of(q, varlen, causal, window, softcap, scale);
  options.dropout_p = dropout_p;
  options.bottom_right = !top_left;
  const Longest longest{max_seqlen_q.value_or(0), max_seqlen_k.value_or(0)};
  const auto seed = draw_seed(q, dropout_p);
  if (!varlen) {
    return run({q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed}, longest, options);
  }
  TORCH_CHECK(k.dim() == 3 && v.dim() == 3,
              "attention: k and v must be [tokens, heads, width] with cu_seqlens, got ",
              describe(k), " and ", describe(v));
  const auto heads = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  const auto [out, lse] =
      run({heads(q), heads(k), heads(v), bias, sinks, cu_seqlens_q, cu_seqlens_k, seed}, longest,
          options);
  return {out.squeeze(0).transpose(0, 1), lse.squeeze(0)};
}

// Autocast casts q, k, v and a floating-point bias.
const Operators operators([](Operators& o) {
  o.add_public<attention, Casts<0, 1, 2, 7>>(
      "attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, int[]? window=None,"
      " float? softcap=None, Tensor? sinks=None, Tensor? bias=None, float? scale=None,"
      " float dropout_p=0.0, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
      " SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, bool top_left=False)"
      " -> (Tensor out, Tensor lse)",
      {.random = true});
  o.add_kernel("attention_forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks,"
               " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, SymInt max_q,"
               " SymInt max_k, float[] scalars, int[] window, bool bottom_right)"
               " -> (Tensor out, Tensor lse)",
               flat<attention_outputs>, flat<attention_forward_reference>);
  o.add_kernel("attention_backward(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v,"
               " Tensor? bias, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
               " Tensor? seed, Tensor out, Tensor lse, SymInt max_q, SymInt max_k, float[] scalars,"
               " int[] window, bool bottom_right, bool[5] output_mask)"
               " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
               flat<attention_backward_outputs>, flat<attention_backward_reference>);
});

}  // namespace fusedops::attention
