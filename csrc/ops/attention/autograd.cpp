// attention: the schemas, autograd, autocast, and the choice between kernels and ATen calls.

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "csrc/ops/attention/operators.h"
#include "csrc/ops/autograd.h"

namespace fusedops {
namespace {

// The arguments of a call that stay the same for its backward.
struct Call {
  OptionalTensor cu_seqlens_q, cu_seqlens_k, seed;
  c10::SymInt max_q, max_k;
  AttentionOptions options;
};

OutAndLse forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                  const OptionalTensor& sinks, const Call& call) {
  static const auto op = handle<decltype(attention_outputs)>("fusedops::attention_forward");
  const auto how = call.options.how();
  const auto window = call.options.window();
  return op.call(q, k, v, bias, sinks, call.cu_seqlens_q, call.cu_seqlens_k, call.seed, call.max_q,
                 call.max_k, how, window, call.options.bottom_right);
}

// Keeps no scores: the backward computes them again.
struct AttentionNode {
  static constexpr const char* kName = "FusedAttentionBackward";
  static constexpr size_t kInputs = 5;  // q, k, v, bias, sinks, which are the first of the saved
  enum : size_t { kOut = kInputs, kLse, kCuSeqlensQ, kCuSeqlensK, kSeed, kSaved };

  c10::SymInt max_q, max_k;
  AttentionOptions options;

  static auto fields(auto& self) {
    auto& o = self.options;
    return std::tie(self.max_q, self.max_k, o.scale, o.softcap, o.dropout_p, o.left, o.right,
                    o.bottom_right);
  }

  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 5> wanted) const {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(kInputs);
    variable_list leaves;
    for (size_t i = 0; i < kInputs; ++i) leaves.push_back(saved[i]);
    const auto grad = grads[0].defined() ? grads[0] : at::zeros_like(saved[kOut]);
    const auto bias = optional(leaves[3]), sinks = optional(leaves[4]);
    const auto cu_seqlens_q = optional(saved[kCuSeqlensQ]),
               cu_seqlens_k = optional(saved[kCuSeqlensK]);
    if (at::GradMode::is_enabled()) {  // in ATen calls, which have gradients themselves
      const auto [dq, dk, dv, dbias, dsinks] =
          attention_gradients(grad, optional(grads[1]), leaves[0], leaves[1], leaves[2], bias,
                              sinks, cu_seqlens_q, cu_seqlens_k, optional(saved[kSeed]), options,
                              wanted);
      return {dq, dk, dv, dbias, dsinks};
    }
    static const auto op =
        handle<decltype(attention_backward_outputs)>("fusedops::attention_backward");
    const auto how = options.how();
    const auto window = options.window();
    const auto [dq, dk, dv, dbias, dsinks] =
        op.call(grad, optional(grads[1]), leaves[0], leaves[1], leaves[2], bias, sinks,
                cu_seqlens_q, cu_seqlens_k, optional(saved[kSeed]), saved[kOut], saved[kLse], max_q,
                max_k, how, window, options.bottom_right, wanted);
    return {dq, dk, dv, dbias, dsinks};
  }
};

OutAndLse with_gradient(const Tensor& q, const Tensor& k, const Tensor& v,
                        const OptionalTensor& bias, const OptionalTensor& sinks, const Call& call) {
  const auto node = make_node<FusedNode<AttentionNode>>();
  const auto bias_ = value_or_undefined(bias), sinks_ = value_or_undefined(sinks);
  node->set_next_edges(torch::autograd::collect_next_edges(q, k, v, bias_, sinks_));
  const auto outputs = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return forward(q, k, v, bias, sinks, call);
  }();
  const auto& [out, lse] = outputs;
  torch::autograd::set_history(variable_list{out, lse}, node);
  node->backward = {call.max_q, call.max_k, call.options};
  const auto saved = [](const OptionalTensor& t) {
    return SavedVariable(value_or_undefined(t), false);
  };
  const auto offsets = [&saved](const OptionalTensor& t) {
    return saved(given(t) && t->is_inference() ? t->clone() : t);
  };
  node->saved = {saved(q),
                 saved(k),
                 saved(v),
                 saved(bias),
                 saved(sinks),
                 SavedVariable(out, true),
                 SavedVariable(lse, true),
                 offsets(call.cu_seqlens_q),
                 offsets(call.cu_seqlens_k),
                 saved(call.seed)};
  return outputs;
}

OutAndLse run(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
              const OptionalTensor& sinks, const Call& call) {
  if (needs_composite({q, k, v, bias, sinks})) {
    attention_check(q, k, v, bias, sinks, call.cu_seqlens_q, call.cu_seqlens_k);
    return attention_formula(q, k, v, bias, sinks, call.cu_seqlens_q, call.cu_seqlens_k, call.seed,
                             call.options);
  }
  if (needs_gradient({q, k, v, bias, sinks})) return with_gradient(q, k, v, bias, sinks, call);
  at::AutoDispatchBelowADInplaceOrView below;
  return forward(q, k, v, bias, sinks, call);
}

// Drawn by ATen: `torch.manual_seed` reproduces it, and nothing waits for the device.
OptionalTensor draw_seed(const Tensor& x, double dropout_p) {
  if (dropout_p == 0) return std::nullopt;
  return at::randint(std::numeric_limits<int64_t>::max(), {}, x.options().dtype(at::kLong));
}

template <c10::DispatchKey key, c10::DeviceType device>
OutAndLse attention_autocast(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                             at::OptionalIntArrayRef window, std::optional<double> softcap,
                             const OptionalTensor& sinks, const OptionalTensor& bias,
                             std::optional<double> scale, double dropout_p,
                             const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                             std::optional<c10::SymInt> max_seqlen_q,
                             std::optional<c10::SymInt> max_seqlen_k, bool top_left) {
  const c10::impl::ExcludeDispatchKeyGuard off(key);
  const auto to = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(to, t, device); };
  const bool additive = given(bias) && bias->scalar_type() != at::kBool;
  static const auto op = handle<decltype(attention)>("fusedops::attention");
  return op.call(cast(q), cast(k), cast(v), causal, window, softcap, sinks,
                 additive ? OptionalTensor(cast(*bias)) : bias, scale, dropout_p, cu_seqlens_q,
                 cu_seqlens_k, std::move(max_seqlen_q), std::move(max_seqlen_k), top_left);
}

}  // namespace

OutAndLse attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                    at::OptionalIntArrayRef window, std::optional<double> softcap,
                    const OptionalTensor& sinks, const OptionalTensor& bias,
                    std::optional<double> scale, double dropout_p,
                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                    std::optional<c10::SymInt> max_seqlen_q,
                    std::optional<c10::SymInt> max_seqlen_k, bool top_left) {
  const bool varlen = given(cu_seqlens_q) || given(cu_seqlens_k);
  TORCH_CHECK(q.dim() == (varlen ? 3 : 4), "attention: q must be ",
              varlen ? "[tokens, heads, width] with cu_seqlens"
                     : "[batch, heads, queries, width] without cu_seqlens",
              ", got ", describe(q));
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1,
                    "attention: dropout_p must be from 0 to 1, got ", dropout_p);
  TORCH_CHECK_VALUE(!softcap || (*softcap > 0 && std::isfinite(*softcap)),
                    "attention: softcap must be above 0 and finite, got ", softcap.value_or(0));
  TORCH_CHECK_VALUE(!window || (window->size() == 2 && window->at(0) >= -1 && window->at(1) >= -1),
                    "attention: window must be (left, right), each -1 (open) or more, got ",
                    window ? *window : at::IntArrayRef());
  const int64_t left = window ? window->at(0) : -1, right = window ? window->at(1) : -1;
  const double by_width = 1 / std::sqrt(q.sym_size(-1).guard_int(__FILE__, __LINE__));
  const AttentionOptions options(scale.value_or(by_width), softcap.value_or(0), dropout_p, left,
                                 causal ? 0 : right, !top_left);
  const Call call{cu_seqlens_q,
                  cu_seqlens_k,
                  draw_seed(q, dropout_p),
                  max_seqlen_q.value_or(0),
                  max_seqlen_k.value_or(0),
                  options};
  if (!varlen) return run(q, k, v, bias, sinks, call);
  TORCH_CHECK(k.dim() == 3 && v.dim() == 3,
              "attention: k and v must be [tokens, heads, width] with cu_seqlens, got ",
              describe(k), " and ", describe(v));
  const auto heads = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  const auto [out, lse] = run(heads(q), heads(k), heads(v), bias, sinks, call);
  return {out.squeeze(0).transpose(0, 1), lse.squeeze(0)};
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> random{at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, int[]? window=None,"
        " float? softcap=None, Tensor? sinks=None, Tensor? bias=None, float? scale=None,"
        " float dropout_p=0.0, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
        " SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, bool top_left=False)"
        " -> (Tensor out, Tensor lse)",
        random);
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks,"
        " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, SymInt max_q, SymInt max_k,"
        " float[] how, int[] window, bool bottom_right) -> (Tensor out, Tensor lse)",
        pure);
  m.def("attention_backward(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v,"
        " Tensor? bias, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed,"
        " Tensor out, Tensor lse, SymInt max_q, SymInt max_k, float[] how, int[] window,"
        " bool bottom_right, bool[5] output_mask)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
        pure);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) { m.impl("attention", attention); }

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) { m.impl("attention", attention); }

TORCH_LIBRARY_IMPL(fusedops, AutocastCPU, m) {
  m.impl("attention", attention_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(fusedops, AutocastCUDA, m) {
  m.impl("attention", attention_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("attention_forward", attention_composite);
  m.impl("attention_backward", attention_backward_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("attention_forward", attention_outputs);
  m.impl("attention_backward", attention_backward_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("attention_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
