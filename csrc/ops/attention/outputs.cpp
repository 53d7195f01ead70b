// Checks attention's arguments and allocates the outputs that its kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/attention/operators.h"
#include "csrc/ops/checks.h"

namespace fusedops::attention {
namespace {

// [B, H, S, D] with memory [B, S, H, D], the layout of the projections before and after.
Tensor empty_heads(const Tensor& like, c10::SymInt heads, c10::SymInt width) {
  const std::array<c10::SymInt, 4> shape{like.sym_size(0), like.sym_size(2), std::move(heads),
                                         std::move(width)};
  return at::empty_symint(shape, like.options()).transpose(1, 2);
}

Tensor gradient_of(bool needs_grad, const Tensor& t) {
  return needs_grad ? empty_heads(t, t.sym_size(1), t.sym_size(3)) : Tensor();
}

void check_heads(const char* name, const Tensor& t, const Tensor& q, int64_t width_as_q) {
  check_same_device(kOp, name, t, "q", q);
  TORCH_CHECK(t.dim() == 4 && t.scalar_type() == q.scalar_type() &&
                  t.sym_size(0) == q.sym_size(0) && (!width_as_q || t.sym_size(3) == q.sym_size(3)),
              kOp, ": ", name, " must be [batch, heads, keys, ", width_as_q ? "width" : "any width",
              "] of q's dtype, batch", width_as_q ? " and width, " : ", ", describe(q), ", got ",
              describe(t));
}

void check_bias(const Tensor& bias, const Tensor& q, const Tensor& k) {
  check_same_device(kOp, "bias", bias, "q", q);
  const std::array<c10::SymInt, 4> scores{q.sym_size(0), q.sym_size(1), q.sym_size(2),
                                          k.sym_size(2)};
  bool fits = bias.dim() <= 4;
  for (int64_t d = 1; fits && d <= bias.dim(); ++d) {
    fits = bias.sym_size(-d) == 1 || bias.sym_size(-d) == scores[4 - d];
  }
  const bool kind = bias.scalar_type() == at::kBool || bias.scalar_type() == q.scalar_type() ||
                    bias.scalar_type() == at::kFloat;
  TORCH_CHECK(fits && kind, kOp, ": bias must be bool, float32 or of q's dtype, ",
              c10::getDtypeNames(q.scalar_type()).first, ", and broadcast to the scores ",
              c10::SymIntArrayRef(scores), ", got ", describe(bias));
}

}  // namespace

void check_group(const Tensor& q, const Tensor& k) {
  TORCH_CHECK(k.sym_size(1) == q.sym_size(1) ||
                  (k.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0),
              kOp, ": k's heads must divide q's, ", q.sym_size(1), ", got ", k.sym_size(1));
}

void check_sinks(const OptionalTensor& sinks, const Tensor& q) {
  if (!is_defined(sinks)) return;
  check_floating(kOp, "sinks", *sinks);
  check_same_device(kOp, "sinks", *sinks, "q", q);
  TORCH_CHECK(sinks->dim() == 1 && sinks->sym_size(0) == q.sym_size(1), kOp,
              ": sinks must be one number a head of q, [", q.sym_size(1), "], got ",
              describe(*sinks));
}

void check_cu_seqlens(const char* name, const OptionalTensor& cu, const Tensor& q) {
  if (!is_defined(cu)) return;
  check_same_device(kOp, name, *cu, "q", q);
  TORCH_CHECK(cu->dim() == 1 && cu->sym_numel() > 0 &&
                  (cu->scalar_type() == at::kInt || cu->scalar_type() == at::kLong),
              kOp, ": ", name, " must be int32 or int64 [sequences + 1], got ", describe(*cu));
}

void check_sequences(const char* name, const Tensor& cu_seqlens, const c10::SymInt& tokens) {
  if (!cu_seqlens.is_cpu() || !has_numbers(cu_seqlens)) return;
  const auto cu = cu_seqlens.to(at::kLong).contiguous();
  const auto* const starts = cu.const_data_ptr<int64_t>();
  int64_t before = 0;
  for (int64_t i = 0; i < cu.numel(); before = starts[i++]) {
    const bool fits = i == 0 ? starts[i] == 0 : before <= starts[i] && starts[i] <= tokens;
    TORCH_CHECK(fits, kOp, ": ", name, " must grow from 0 to at most ", tokens,
                ", the number of tokens, got ", starts[i], " at index ", i, i == 0 ? "" : " after ",
                i == 0 ? "" : std::to_string(before));
  }
}

void attention_check(const AttentionInputs& in) {
  const auto& [q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed] = in;
  check_floating(kOp, "q", q);
  TORCH_CHECK(q.dim() == 4, kOp, ": q must be [batch, heads, queries, width], got ", describe(q));
  check_heads("k", k, q, true);
  check_heads("v", v, q, false);
  TORCH_CHECK(v.sym_size(1) == k.sym_size(1) && v.sym_size(2) == k.sym_size(2), kOp,
              ": v must have the heads and keys of k, ", describe(k), ", got ", describe(v));
  check_group(q, k);
  if (is_defined(bias)) check_bias(*bias, q, k);
  check_sinks(sinks, q);
  check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q);
  check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q);
  if (!is_defined(cu_seqlens_q) && !is_defined(cu_seqlens_k)) return;
  TORCH_CHECK(is_defined(cu_seqlens_q) && is_defined(cu_seqlens_k) &&
                  cu_seqlens_q->sym_numel() == cu_seqlens_k->sym_numel(),
              kOp,
              ": cu_seqlens_q and cu_seqlens_k must come together and count the same sequences");
  check_sequences("cu_seqlens_q", *cu_seqlens_q, q.sym_size(2));
  check_sequences("cu_seqlens_k", *cu_seqlens_k, k.sym_size(2));
  TORCH_CHECK(!is_defined(bias), kOp, ": bias does not go with cu_seqlens, got ", describe(*bias));
}

OutAndLse attention_outputs(const AttentionArguments& a) {
  const auto& [q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed] = a.in;
  attention_check(a.in);
  return empty_outputs(q, v);
}

OutAndLse empty_outputs(const Tensor& q, const Tensor& v) {
  const auto rows = q.sym_sizes().slice(0, 3);
  return {empty_heads(q, q.sym_size(1), v.sym_size(3)),
          at::empty_symint(rows, q.options().dtype(at::kDouble))};
}

AttentionGradients attention_backward_outputs(const AttentionBackwardArguments& a) {
  attention_check(a.in);
  TORCH_CHECK(a.grad.sym_sizes().equals(a.out.sym_sizes()) &&
                  (!is_defined(a.grad_lse) || a.grad_lse->sym_sizes().equals(a.lse.sym_sizes())),
              "attention_backward: grad must be like out, ", describe(a.out), ", got ",
              describe(a.grad));
  const auto like = [](bool needs_grad, const OptionalTensor& t) {
    return needs_grad && is_defined(t) ? empty_contiguous(*t) : Tensor();
  };
  const auto& mask = a.output_mask;
  return {gradient_of(mask[0], a.in.q), gradient_of(mask[1], a.in.k), gradient_of(mask[2], a.in.v),
          like(mask[3], a.in.bias), like(mask[4], a.in.sinks)};
}

}  // namespace fusedops::attention
