// Attention by its definition, fusedops/references/attention.py.

#include "csrc/ops/reference.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <vector>

#include "csrc/ops/attention/cached.h"
#include "csrc/ops/attention/operators.h"

namespace fusedops::attention {
namespace {

OutAndLse definition(const AttentionArguments& a) {
  return call<"fusedops::attention_forward_reference", OutAndLse>(a);
}

OutAndLse definition(const CachedAttentionArguments& a) {
  return call<"fusedops::cached_attention_forward_reference", OutAndLse>(a);
}

}  // namespace

OutAndLse attention_reference(const AttentionArguments& a) {
  attention_check(a.in);
  return definition(a);
}

OutAndLse attention_forward_reference(const AttentionArguments& a) {
  const auto outputs = attention_outputs(a);
  copy_defined(outputs, definition(a));
  return outputs;
}

AttentionGradients attention_gradients(const Tensor& grad, const OptionalTensor& grad_lse,
                                       const AttentionArguments& a,
                                       std::array<bool, 5> needs_grad) {
  const auto& [q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed] = a.in;
  const auto forward = [&](const std::array<Tensor, 5>& inputs) -> variable_list {
    const auto input_bias = optional(inputs[3]), input_sinks = optional(inputs[4]);
    const auto [out, lse] = definition({{inputs[0], inputs[1], inputs[2], input_bias, input_sinks,
                                         a.in.cu_seqlens_q, a.in.cu_seqlens_k, a.in.seed},
                                        a.numbers});
    return {out, lse};
  };
  const auto [dq, dk, dv, dbias, dsinks] =
      gradients_of<5>(forward, {q, k, v, value_or_undefined(bias), value_or_undefined(sinks)},
                      needs_grad, {grad, value_or_undefined(grad_lse)});
  const bool from_lse = needs_grad[2] && !dv.defined();  // lse does not depend on v
  return {dq, dk, from_lse ? at::zeros_like(v) : dv, dbias, dsinks};
}

AttentionGradients attention_backward_reference(const AttentionBackwardArguments& a) {
  const auto outputs = attention_backward_outputs(a);
  copy_defined(outputs, attention_gradients(a.grad, a.grad_lse, {a.in, a.numbers}, a.output_mask));
  return outputs;
}

OutAndLse cached_attention_reference(const CachedAttentionArguments& a) {
  cached_attention_check(a.in);
  return definition(a);
}

OutAndLse cached_attention_forward_reference(const CachedAttentionArguments& a) {
  const auto outputs = cached_attention_outputs(a);
  copy_defined(outputs, definition(a));
  return outputs;
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("attention_forward_reference(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks,"
        " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, SymInt max_q, SymInt max_k,"
        " float[] scalars, int[] window, bool bottom_right) -> (Tensor out, Tensor lse)",
        pure);
  m.def("cached_attention_forward_reference(Tensor q, Tensor k, Tensor v, Tensor seqused_k,"
        " Tensor? block_table, Tensor? sinks, Tensor? cu_seqlens_q, float[] scalars, int[] window)"
        " -> (Tensor out, Tensor lse)",
        pure);
}

}  // namespace fusedops::attention
