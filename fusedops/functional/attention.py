"""attention and scaled_dot_product_attention.

One pass over the keys, with the softmax's sums corrected on the way: Dao et al., arXiv:2205.14135;
Dao, arXiv:2307.08691. Grouped heads: Ainslie et al., arXiv:2305.13245. Sinks, one number per head
added to the softmax's sum: Xiao et al., arXiv:2309.17453.
"""

import math
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.extension import _C, UNCOMPILED, ops, traced
from fusedops.functional.sharded import sharded_call

__all__ = ["attention", "scaled_dot_product_attention"]

# Devices with an `attention` kernel. Elsewhere its definition stores all scores, like eager code.
# Triton's kernels are registered later.
DEVICES = {
    device
    for device, key in {"cpu": "CPU", "meta": "Meta"}.items()
    if not UNCOMPILED
    and torch._C._dispatch_has_kernel_for_dispatch_key("fusedops::attention_forward", key)
} | ({"cuda"} if find_spec("triton") and not UNCOMPILED else set())


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention that never stores the scores, forward or backward.

        s = softcap tanh(scale q k^T / softcap) + bias      without a softcap: scale q k^T + bias
        out = dropout(softmax(s)) v, lse = logsumexp(s)     sinks: exp(sinks) is in both sums

    q: [B, Hq, Sq, D]. k: [B, Hkv, Sk, D]. Hkv divides Hq; query head h uses key head h //
    (Hq / Hkv). v: [B, Hkv, Sk, Dv]. All have the same dtype (float32, float16, bfloat16 or float64)
    and may have any strides. bias: bool (True means visible), or numbers in float32 or q's dtype;
    it broadcasts to [B, Hq, Sq, Sk] and gets a gradient. sinks: [Hq]. scale: 1 / sqrt(D) by
    default.

    causal: a query sees no later key; the last query is aligned with the last key ("bottom right").
    window: (left, right), how many keys before and after its own position a query sees; -1 means
    all. cu_seqlens_q and cu_seqlens_k pack sequences: int32 or int64 [sequences + 1], starting at
    0. Then q is [tokens, Hq, D], and k and v likewise. Sequence n has the tokens from cu_seqlens[n]
    to cu_seqlens[n + 1] and sees only itself. max_seqlen_* is the longest sequence's length; if it
    is missing, it is read from cu_seqlens. Tokens after the last sequence, and queries that see no
    key, get outputs and gradients of 0. The lse of a token after the last sequence is -inf, also
    with sinks.

    seqused_k: int32 or int64 [B], for generation: k and v are a cache, and sequence b uses its
    first seqused_k[b] keys. What is after them is not read. Queries are aligned with the last used
    key. With block_table, int32 or int64 [B, blocks], the cache is paged as in vLLM (Kwon et al.,
    arXiv:2309.06180): k and v are [num_blocks, block_size, Hkv, D], and the keys of sequence b are
    in blocks block_table[b, 0], block_table[b, 1] and so on. Sequences may share blocks, and
    entries after the last used block may be anything. q may be packed with cu_seqlens_q, without
    cu_seqlens_k. Kernels read blocks in place, and have no backward: calls that need gradients copy
    the cache and store all scores. bias and dropout_p do not go with a cache. On CPUs, a used entry
    outside [0, num_blocks) and a seqused_k outside [0, room] raise RuntimeError. On GPUs, where a
    check would wait for the device, such numbers are replaced by the nearest valid ones.

    Returns out, [B, Hq, Sq, Dv] or [tokens, Hq, Dv], in q's dtype. Its memory order is
    [B, Sq, Hq, Dv]. With return_lse, it also returns lse, [B, Hq, Sq] or [Hq, tokens], float32
    (float64 for float64 inputs), which has a gradient too. Sums are float32 (float64 for float64).
    On CPUs with bfloat16 matmul instructions, probabilities are rounded to bfloat16 before they
    multiply v. The backward redraws the dropout mask from a seed that follows `torch.manual_seed`.
    Raises RuntimeError if a shape or dtype does not fit, and ValueError for an invalid softcap,
    window or dropout_p.
    """
    if block_table is None and seqused_k is None:
        out, lse = _attention(
            q, k, v, causal, window, softcap, sinks, bias, scale, dropout_p, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, False,
        )  # fmt: skip
    else:
        _check_cache(seqused_k, block_table, bias, dropout_p, cu_seqlens_k)
        run = ops.cached_attention
        if not traced(q, k, v, seqused_k, block_table, sinks, cu_seqlens_q):
            run = _C.cached_attention
        out, lse = run(
            q, k, v, seqused_k, block_table=block_table, causal=causal, window=window,
            softcap=softcap, sinks=sinks, scale=scale, cu_seqlens_q=cu_seqlens_q,
        )  # fmt: skip
    if not return_lse:
        return out
    return out, lse if q.dtype == torch.float64 else lse.float()


def _check_cache(
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    bias: Tensor | None,
    dropout_p: float,
    cu_seqlens_k: Tensor | None,
) -> None:
    if seqused_k is None:
        raise RuntimeError("attention: block_table needs seqused_k, the keys of each sequence")
    for name, t in (("seqused_k", seqused_k), ("block_table", block_table)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"attention: {name} must be a tensor, got {type(t).__name__}")
    if cu_seqlens_k is not None:
        raise RuntimeError(
            "attention: cu_seqlens_k does not go with seqused_k: a cache's keys are not packed"
        )
    if bias is not None:
        raise RuntimeError("attention: bias does not go with seqused_k")
    if dropout_p:
        raise ValueError(f"attention: dropout_p must be 0 with seqused_k, got {dropout_p:g}")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by `attention`.

    query: [..., Hq, L, E]. key: [..., H, S, E]. value: [..., H, S, Ev]. Batch dimensions broadcast.
    Heads broadcast too, unless enable_gqa is set: then each head of key and value serves several
    query heads, and key and value may have different head counts. is_causal aligns the first query
    with the first key, as in torch. Nested tensors, and is_causal together with attn_mask, go to
    torch's own function. (On CPUs, torch 2.13 applies both masks in its flash kernel, and raises
    where that kernel does not run.) Raises RuntimeError if shapes do not broadcast or head counts
    do not divide, and TypeError for arguments of another type.
    """
    if not isinstance(is_causal, bool):
        raise TypeError(
            "scaled_dot_product_attention: is_causal must be a bool, got "
            f"{type(is_causal).__name__}"
        )
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        raise _not_a_tensor(query=query, key=key, value=value)
    nested = query.is_nested or key.is_nested or value.is_nested
    if (
        nested
        or (is_causal and attn_mask is not None)
        or (enable_gqa and _no_heads(query, key, value))
    ):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    shape: tuple[int, ...] = query.shape
    if len(shape) != 4 or not _same_batch(query, key, value, enable_gqa):
        batch_end = -3 if enable_gqa else -2
        shape = _scores_shape(query, key, value, batch_end)
        if enable_gqa:
            key, value = _with_equal_heads(query, key, value)
        query, key, value = (_as_four_dims(t, shape, batch_end) for t in (query, key, value))
        if isinstance(attn_mask, Tensor) and attn_mask.dim() > 3:
            attn_mask = _mask_as_four_dims(attn_mask, shape)
    out, _ = _attention(
        query, key, value, is_causal, None, None, None, attn_mask, scale, dropout_p, None, None,
        None, None, True,
    )  # fmt: skip
    return out if len(shape) == 4 else out.reshape(*shape[:-1], out.shape[-1])


def _not_a_tensor(**arguments: object) -> TypeError:
    name, wrong = next((n, t) for n, t in arguments.items() if not isinstance(t, Tensor))
    return TypeError(
        f"scaled_dot_product_attention: {name} must be a tensor, got {type(wrong).__name__}"
    )


def _same_batch(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether no broadcasting is needed: equal batch and heads, or only query has more heads."""
    shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if shape == key_shape == value_shape:
        return True
    batch_end = -3 if enable_gqa else -2
    return key_shape[:batch_end] == shape[:batch_end] and key_shape[:-2] == value_shape[:-2]


def _no_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether value has no heads: torch then returns zeros."""
    return min(t.dim() for t in (query, key, value)) > 2 and not value.shape[-3]


def _scores_shape(query: Tensor, key: Tensor, value: Tensor, batch_end: int) -> tuple[int, ...]:
    """[*batch, heads, L, S], after the dimensions before `batch_end` are broadcast."""
    shapes = [list(t.shape) for t in (query, key, value)]
    got = f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
    if min(map(len, shapes)) < -batch_end:
        least = "[..., length, width]" if batch_end == -2 else "[..., heads, length, width]"
        raise RuntimeError(
            f"scaled_dot_product_attention: query, key and value must be {least}, {got}"
        )
    try:
        batch_shape = torch.broadcast_shapes(*(shape[:batch_end] for shape in shapes))
    except RuntimeError:
        hint = " (enable_gqa=True lets key and value have fewer heads)" if batch_end == -2 else ""
        raise RuntimeError(
            "scaled_dot_product_attention: the batch and head dimensions of query, key and value "
            f"must broadcast, {got}{hint}"
        ) from None
    return *batch_shape, *query.shape[batch_end:-2], query.shape[-2], key.shape[-2]


def _with_equal_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats key's and value's heads to their least common multiple."""
    heads, counts = query.shape[-3], (key.shape[-3], value.shape[-3])
    if counts[0] == counts[1]:
        return key, value
    for name, count in zip(("key", "value"), counts, strict=True):
        if not count or heads % count:
            raise RuntimeError(
                f"scaled_dot_product_attention: {name} must have a number of heads that divides "
                f"query's, {heads}, got {count}"
            )
    common = math.lcm(*counts)
    key = key.repeat_interleave(common // counts[0], -3)
    return key, value.repeat_interleave(common // counts[1], -3)


def _as_four_dims(t: Tensor, scores_shape: tuple[int, ...], batch_end: int) -> Tensor:
    """query, key or value as [batch, heads, length, width], expanded to the scores' batch."""
    t = t.expand(*scores_shape[:batch_end], *t.shape[batch_end:])
    if t.dim() > 4:
        return t.flatten(0, -4)
    return t.reshape(*[1] * (4 - t.dim()), *t.shape)


def _mask_as_four_dims(mask: Tensor, scores_shape: tuple[int, ...]) -> Tensor:
    try:
        whole = mask.expand(scores_shape)
    except RuntimeError:
        raise RuntimeError(
            "scaled_dot_product_attention: attn_mask must broadcast to the scores "
            f"{list(scores_shape)}, got {list(mask.shape)}"
        ) from None
    return whole.flatten(0, -4) if whole.dim() > 4 else whole


def _attention(q, k, v, causal, window, softcap, sinks, bias, scale, dropout_p, *lengths_and_side):
    *lengths, top_left = lengths_and_side
    if type(q) is Tensor and not traced(q, k, v, sinks, bias, *lengths[:2]):
        return _C.attention(
            q, k, v, causal, window, softcap, sinks, bias, scale, dropout_p, *lengths, top_left
        )
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    with sharded_call(dropout_p, q, k, v):
        return ops.attention(
            q, k, v, causal=causal, window=window, softcap=softcap, sinks=sinks, bias=bias,
            scale=scale, dropout_p=dropout_p, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, top_left=top_left,
        )  # fmt: skip
