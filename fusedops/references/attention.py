"""The definition of attention, in plain PyTorch: exact for float64 inputs.

Like the operators, they return (out, lse).
"""

import math

import torch
import torch.nn.functional as F

from fusedops.references.norm import dropout_reference

__all__ = ["attention_reference", "cached_attention_reference"]

WIDEST = 1 << 61  # the widest window: no sum of positions overflows


def attention_reference(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softcap=None,
    sinks=None,
    bias=None,
    scale=None,
    dropout_p=0.0,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    top_left=False,
    seed=None,
):
    packed = cu_seqlens_q is not None
    q, k, v = (t.transpose(0, 1)[None] if packed else t for t in (q, k, v))
    seen = _seen(q, k, cu_seqlens_q, cu_seqlens_k, _sides(window, causal), top_left)
    options = {"sinks": sinks, "scale": scale, "softcap": softcap}
    out, lse = _attention(q, k, v, seen, bias=bias, dropout_p=dropout_p, seed=seed, **options)
    lse = _without_padding(lse, cu_seqlens_q)
    return (out[0].transpose(0, 1), lse[0]) if packed else (out, lse)


def attention_forward_reference(
    q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed, max_q, max_k, scalars, window,
    bottom_right,
):  # fmt: skip
    """The kernel operator's form: heads before tokens, scores in float32, and lse in float64."""
    seen = _seen(q, k, cu_seqlens_q, cu_seqlens_k, window, not bottom_right)
    scale, softcap, dropout_p = scalars
    options = {"bias": bias, "sinks": sinks, "dropout_p": dropout_p, "seed": seed}
    out, lse = _accumulated(q, k, v, seen, scale=scale, softcap=softcap or None, **options)
    return out, _without_padding(lse, cu_seqlens_q).double()


def _attention(
    q, k, v, seen, *, bias=None, sinks=None, scale=None, softcap=None, dropout_p=0.0, seed=None
):
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]. seen: bool, or None for all keys."""
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if bias is not None and bias.dtype == torch.bool:
        seen = _both(seen, bias)
    elif bias is not None:
        s = s + bias.to(s.dtype)
    s = s if seen is None else torch.where(seen, s, -torch.inf)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    s = torch.where(dead, 0, s).to(torch.promote_types(s.dtype, torch.float32))
    lse = torch.where(dead, -torch.inf, _logsumexp(s))
    if sinks is not None:
        sink = sinks.to(lse.dtype)[:, None, None]
        lse = torch.where(dead, sink, torch.logaddexp(torch.where(dead, 0, lse), sink))
    all_scores = s if sinks is None else torch.cat([s, sink.expand_as(dead)], -1)
    p = torch.where(dead, 0, all_scores.softmax(-1)[..., : s.shape[-1]]).to(q.dtype)
    return dropout_reference(p, dropout_p, seed=seed) @ v, lse.squeeze(-1)


def _accumulated(q, k, v, seen, **options):
    """_attention in float32 or float64, whose out is rounded to q's dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = _attention(q.to(wide), k.to(wide), v.to(wide), seen, **options)
    return out.to(q.dtype), lse


def _sides(window, causal):
    left, right = (-1, -1) if window is None else window
    return left, 0 if causal else right


def _without_padding(lse, cu_seqlens_q):
    """lse, with cu_seqlens_q [1, Hq, tokens], and -inf for tokens past the last sequence."""
    if cu_seqlens_q is None:
        return lse
    sequence, _ = _places(cu_seqlens_q, torch.arange(lse.shape[-1], device=lse.device))
    return torch.where(sequence < 0, -torch.inf, lse)


def _logsumexp(s):
    """logsumexp that is also correct if all scores are finfo.min.

    For those, torch's function loses log(n) in its sum and gives gradients of 1.
    """
    if s.shape[-1] == 0:
        return s.sum(-1, keepdim=True) - torch.inf
    max_score = s.detach().amax(-1, keepdim=True)
    max_score = torch.where(max_score.isfinite(), max_score, 0)
    return max_score + (s - max_score).logsumexp(-1, keepdim=True)


def _seen(q, k, cu_seqlens_q, cu_seqlens_k, sides, top_left):
    """Which keys each query sees, [Sq, Sk] bool, or None for all."""
    queries, keys = q.shape[-2], k.shape[-2]
    i, j = torch.arange(queries, device=q.device), torch.arange(keys, device=q.device)
    if cu_seqlens_q is None:
        at = i + (0 if top_left else keys - queries)
        return _in_window(None, at[:, None], j, sides)
    (q_of, i), (k_of, j) = _places(cu_seqlens_q, i), _places(cu_seqlens_k, j)
    more = F.pad(_lengths(cu_seqlens_k) - _lengths(cu_seqlens_q), (0, 1))  # 0: past the last one
    seen = (q_of[:, None] == k_of) & (q_of[:, None] >= 0)
    at = i if top_left else i + more[q_of]
    return _in_window(seen, at[:, None], j, sides)


def _places(cu_seqlens, tokens):
    """Each token's sequence (-1 past the last one) and its position in it."""
    cu_seqlens = cu_seqlens.long()
    sequence = (tokens[:, None] >= cu_seqlens).sum(-1) - 1
    place = tokens - cu_seqlens[sequence]
    return torch.where(sequence < cu_seqlens.shape[0] - 1, sequence, -1), place


def _lengths(cu_seqlens):
    return (cu_seqlens[1:] - cu_seqlens[:-1]).long()


def _in_window(seen, at, j, sides):
    """Hides the keys j that are outside a window around `at`."""
    left, right = (min(side, WIDEST) for side in sides)
    seen = seen if left < 0 else _both(seen, j >= at - left)
    return seen if right < 0 else _both(seen, j <= at + right)


def _both(seen, mask):
    return mask if seen is None else seen & mask


def cached_attention_reference(
    q,
    k,
    v,
    seqused_k,
    *,
    block_table=None,
    causal=False,
    window=None,
    softcap=None,
    sinks=None,
    scale=None,
    cu_seqlens_q=None,
):
    packed = cu_seqlens_q is not None
    q = q.transpose(0, 1)[None] if packed else q
    k, v, seen = _used(q, k, v, seqused_k, block_table, cu_seqlens_q, _sides(window, causal))
    out, lse = _attention(q, k, v, seen, sinks=sinks, scale=scale, softcap=softcap)
    lse = _without_padding(lse, cu_seqlens_q)
    return (out[0].transpose(0, 1), lse[0]) if packed else (out, lse)


def cached_attention_forward_reference(
    q, k, v, seqused_k, block_table, sinks, cu_seqlens_q, scalars, window
):
    """The kernel operator's form: heads before tokens, scores in float32, and lse in float64."""
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    k, v, seen = _used(q, k, v, seqused_k, block_table, cu_seqlens_q, window)
    scale, softcap = scalars
    options = {"sinks": sinks, "scale": scale, "softcap": softcap or None}
    out, lse = _accumulated(q, k, v, seen, **options)
    return out, _without_padding(lse, cu_seqlens_q).double()


def _used(q, k, v, seqused_k, block_table, cu_seqlens_q, sides):
    """k and v of all sequences, unused ones 0, and which keys each query sees.

    For packed queries, q [1, Hq, tokens, D], the sequences' keys are concatenated.
    """
    used = seqused_k.long()[:, None]
    if block_table is not None:
        k, v = (_gathered(t, block_table.long()) for t in (k, v))
    j = torch.arange(k.shape[2], device=q.device)
    used = used.clamp(0, k.shape[2])
    exists = j < used  # [B, Sk]
    k, v = (torch.where(exists[:, None, :, None], t, 0) for t in (k, v))
    queries = torch.arange(q.shape[2], device=q.device)
    if cu_seqlens_q is None:
        at = (queries + used - q.shape[2])[..., None]
        return k, v, _in_window(exists[:, None], at, j, sides)[:, None]
    sequence, place = _places(cu_seqlens_q, queries)
    more = F.pad(used[:, 0] - _lengths(cu_seqlens_q), (0, 1))
    sequences = torch.arange(used.shape[0], device=q.device)
    seen = exists & (sequence[:, None] == sequences)[..., None]  # [tokens, B, Sk]
    at = (place + more[sequence])[:, None, None]
    k, v = (t.transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
    return k, v, _in_window(seen, at, j, sides).flatten(1)


def _gathered(cache, block_table):
    """Each sequence's blocks, [B, Hkv, blocks block_size, D], from [blocks, block_size, Hkv, D]."""
    if cache.shape[0] == 0:
        cache = cache.new_zeros(1, *cache.shape[1:])
    return cache[block_table.clamp(0, cache.shape[0] - 1)].flatten(1, 2).transpose(1, 2)
