// Declares attention over a cache of keys and values. A sequence uses the first keys of its cache.
// Shapes: fusedops/functional/attention.py. Formulas: csrc/kernels/attention.h.
//
// In the kernel operator q is [B, Hq, Sq, D], or [1, Hq, tokens, D] with cu_seqlens_q. k is
// [B, Hkv, Sk, D], or [blocks, Hkv, block_size, D] with block_table; v is likewise. Any strides.
// The kernels have no backward: gradients come from the definition.
#pragma once

#include "csrc/ops/attention/operators.h"

namespace fusedops::attention {

struct CacheInputs {
  const Tensor &q, &k, &v, &seqused_k;
  const OptionalTensor &block_table, &sinks, &cu_seqlens_q;

  static auto fields(auto& a) {
    return std::tie(a.q, a.k, a.v, a.seqused_k, a.block_table, a.sinks, a.cu_seqlens_q);
  }
};

// scalars: scale, softcap.
struct CachedAttentionArguments {
  CacheInputs in;
  Numbers scalars;
  at::IntArrayRef window;

  static auto fields(auto& a) { return std::tie(a.in, a.scalars, a.window); }
  AttentionOptions options() const {
    return {scalars.at(0),
            scalars.at(1),
            0,
            std::min(window.at(0), kWidest),
            std::min(window.at(1), kWidest),
            true};
  }
};

// The public operator. q [B, Hq, Sq, D], or [tokens, Hq, D] with cu_seqlens_q; with block_table
// k is [blocks, block_size, Hkv, D].
OutAndLse cached_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& seqused_k, const OptionalTensor& block_table, bool causal,
                           at::OptionalIntArrayRef window, std::optional<double> softcap,
                           const OptionalTensor& sinks, std::optional<double> scale,
                           const OptionalTensor& cu_seqlens_q);

void cached_attention_check(const CacheInputs& in);

// Checks the arguments and allocates the outputs. Also the Meta kernel.
OutAndLse cached_attention_outputs(const CachedAttentionArguments& a);

// reference.cpp: the definition, with a copy of the cache and all scores in memory. The second is
// the kernel operator by the definition.
OutAndLse cached_attention_reference(const CachedAttentionArguments& a);
OutAndLse cached_attention_forward_reference(const CachedAttentionArguments& a);

}  // namespace fusedops::attention
