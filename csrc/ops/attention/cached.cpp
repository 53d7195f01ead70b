// Attention over a cache of keys and values: schemas, autocast, argument checks, and the choice
// between kernels and the definition.

#include "csrc/ops/attention/cached.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "csrc/ops/autograd.h"
#include "csrc/ops/checks.h"

namespace fusedops::attention {
namespace {

// How a user passed k or v.
Tensor as_passed(const Tensor& t, bool paged) {
  return paged && t.dim() == 4 ? t.transpose(1, 2) : t;
}

void check_cache(const char* name, const Tensor& t, const Tensor& q, bool width_as_q, bool paged) {
  check_same_device(kOp, name, t, "q", q);
  TORCH_CHECK(t.dim() == 4 && t.scalar_type() == q.scalar_type() &&
                  (!width_as_q || t.sym_size(3) == q.sym_size(3)),
              kOp, ": ", name, " must be ",
              paged ? "[blocks, block_size, heads, " : "[batch, heads, keys, ",
              width_as_q ? "width] of q's dtype and width, " : "any width] of q's dtype, ",
              describe(q), ", got ", describe(as_passed(t, paged)));
}

void check_integers(const char* name, const Tensor& t, const Tensor& q, int64_t dims,
                    const char* shape) {
  check_same_device(kOp, name, t, "q", q);
  TORCH_CHECK(t.dim() == dims && (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong), kOp,
              ": ", name, " must be int32 or int64 ", shape, ", got ", describe(t));
}

// The keys that a sequence has room for.
c10::SymInt room(const CacheInputs& in) {
  const auto size = in.k.sym_size(2);
  return is_defined(in.block_table) ? in.block_table->sym_size(1) * size : size;
}

// Checks the numbers on CPUs only: a GPU would have to be waited for.
void check_numbers(const CacheInputs& in) {
  if (!in.seqused_k.is_cpu() || !has_numbers(in.seqused_k)) return;
  const auto used = in.seqused_k.to(at::kLong).contiguous();
  const auto* const lengths = used.const_data_ptr<int64_t>();
  const int64_t most = room(in).guard_int(__FILE__, __LINE__);
  for (int64_t b = 0; b < used.numel(); ++b) {
    TORCH_CHECK(0 <= lengths[b] && lengths[b] <= most, kOp, ": seqused_k must be from 0 to ", most,
                ", the keys that a sequence has room for, got ", lengths[b], " at index ", b);
  }
  if (!is_defined(in.block_table) || !has_numbers(*in.block_table)) return;
  const auto table = in.block_table->to(at::kLong).contiguous();
  const int64_t blocks = in.k.size(0), size = in.k.size(2), each = table.size(1);
  for (int64_t b = 0; b < used.numel(); ++b) {
    for (int64_t i = 0; i * size < lengths[b]; ++i) {
      const int64_t block = table.const_data_ptr<int64_t>()[b * each + i];
      TORCH_CHECK(0 <= block && block < blocks, kOp, ": block_table must name blocks from 0 to ",
                  blocks - 1, " where seqused_k has keys, got ", block, " at [", b, ", ", i, "]");
    }
  }
}

OutAndLse run(const CachedAttentionArguments& a) {
  const auto& in = a.in;
  if (needs_composite({in.q, in.k, in.v, in.sinks}) ||
      needs_gradient({in.q, in.k, in.v, in.sinks})) {
    return cached_attention_reference(a);
  }
  return below_autograd([&] { return call<"fusedops::cached_attention_forward", OutAndLse>(a); });
}

}  // namespace

void cached_attention_check(const CacheInputs& in) {
  const auto& [q, k, v, seqused_k, block_table, sinks, cu_seqlens_q] = in;
  const bool paged = is_defined(block_table), packed = is_defined(cu_seqlens_q);
  check_floating(kOp, "q", q);
  TORCH_CHECK(q.dim() == 4, kOp, ": q must be [batch, heads, queries, width], got ", describe(q));
  check_cache("k", k, q, true, paged);
  check_cache("v", v, q, false, paged);
  TORCH_CHECK(k.sym_sizes().slice(0, 3).equals(v.sym_sizes().slice(0, 3)), kOp,
              ": v must have k's shape except for the width, ", describe(as_passed(k, paged)),
              ", got ", describe(as_passed(v, paged)));
  check_group(q, k);
  check_sinks(sinks, q);
  check_integers("seqused_k", seqused_k, q, 1, "[sequences]");
  const auto sequences = seqused_k.sym_size(0);
  if (packed) {
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q);
    TORCH_CHECK(cu_seqlens_q->sym_size(0) == sequences + 1, kOp, ": cu_seqlens_q must be [",
                sequences + 1, "] for the ", sequences, " sequences of seqused_k, got ",
                describe(*cu_seqlens_q));
    check_sequences("cu_seqlens_q", *cu_seqlens_q, q.sym_size(2));
  } else {
    TORCH_CHECK(q.sym_size(0) == sequences, kOp,
                ": seqused_k must be one number per batch entry of q, [", q.sym_size(0), "], got ",
                describe(seqused_k));
  }
  if (paged) {
    check_integers("block_table", *block_table, q, 2, "[sequences, blocks]");
    TORCH_CHECK(block_table->sym_size(0) == sequences, kOp,
                ": block_table must have a row for each of the ", sequences,
                " sequences of seqused_k, got ", describe(*block_table));
    TORCH_CHECK(k.sym_size(2) > 0, kOp, ": k must have blocks of one key or more, got ",
                describe(as_passed(k, true)));
  } else {
    TORCH_CHECK(k.sym_size(0) == sequences, kOp, ": k must have the ", sequences,
                " sequences of seqused_k, got ", describe(k));
  }
  check_numbers(in);
}

OutAndLse cached_attention_outputs(const CachedAttentionArguments& a) {
  cached_attention_check(a.in);
  return empty_outputs(a.in.q, a.in.v);
}

OutAndLse cached_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& seqused_k, const OptionalTensor& block_table, bool causal,
                           at::OptionalIntArrayRef window, std::optional<double> softcap,
                           const OptionalTensor& sinks, std::optional<double> scale,
                           const OptionalTensor& cu_seqlens_q) {
  const bool packed = is_defined(cu_seqlens_q), paged = is_defined(block_table);
  const auto options = options_of(q, packed, causal, window, softcap, scale);
  const std::array<double, 2> scalars{options.scale, options.softcap};
  const auto sides = options.window();
  const auto heads = [&](const Tensor& t) { return paged && t.dim() == 4 ? t.transpose(1, 2) : t; };
  const auto queries = packed ? q.transpose(0, 1).unsqueeze(0) : q;
  const auto keys = heads(k), values = heads(v);
  const auto [out, lse] =
      run({{queries, keys, values, seqused_k, block_table, sinks, cu_seqlens_q}, scalars, sides});
  if (!packed) return {out, lse};
  return {out.squeeze(0).transpose(0, 1), lse.squeeze(0)};
}

// Autocast casts q, k and v, as in `attention`.
const Operators cached_operators([](Operators& o) {
  o.add_public<cached_attention, Casts<0, 1, 2>>(
      "cached_attention(Tensor q, Tensor k, Tensor v, Tensor seqused_k, *,"
      " Tensor? block_table=None, bool causal=False, int[]? window=None, float? softcap=None,"
      " Tensor? sinks=None, float? scale=None, Tensor? cu_seqlens_q=None)"
      " -> (Tensor out, Tensor lse)");
  o.add_kernel("cached_attention_forward(Tensor q, Tensor k, Tensor v, Tensor seqused_k,"
               " Tensor? block_table, Tensor? sinks, Tensor? cu_seqlens_q, float[] scalars,"
               " int[] window) -> (Tensor out, Tensor lse)",
               flat<cached_attention_outputs>, flat<cached_attention_forward_reference>);
});

}  // namespace fusedops::attention
