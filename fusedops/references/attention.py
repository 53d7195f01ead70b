"""The definition of attention, in plain PyTorch: exact for float64 inputs.

Like the operators, they return (out, lse).
"""

import math

import torch
import torch.nn.functional as F

from fusedops.references.norm import dropout_reference

__all__ = ["attention_reference", "cached_attention_reference"]


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
    if cu_seqlens_q is not None:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // max(t.shape[1], 1), 1) for t in (k, v))
    s = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    seen = _seen(q, k, cu_seqlens_q, cu_seqlens_k, left, right, top_left)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    elif bias is not None:
        s = s + bias.to(s.dtype)
    s = torch.where(seen, s, -torch.inf)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    wide = torch.where(dead, 0, s).to(torch.promote_types(s.dtype, torch.float32))
    lse = torch.where(dead, -torch.inf, _logsumexp(wide))
    if sinks is not None:
        sink = sinks.to(lse.dtype)[:, None, None]
        lse = torch.where(dead, sink, torch.logaddexp(torch.where(dead, 0, lse), sink))
    all_scores = wide if sinks is None else torch.cat([wide, sink.expand_as(dead)], -1)
    p = torch.where(dead, 0, all_scores.softmax(-1)[..., : wide.shape[-1]]).to(q.dtype)
    out = dropout_reference(p, dropout_p, seed=seed) @ v
    lse = lse.squeeze(-1)
    if cu_seqlens_q is not None:
        out, lse = out[0].transpose(0, 1), _without_padding(lse[0], cu_seqlens_q)
    return out, lse


def _without_padding(lse, cu_seqlens_q):
    """lse [Hq, tokens], -inf for the tokens past the last sequence."""
    sequence, _ = _places(cu_seqlens_q, torch.arange(lse.shape[1], device=lse.device))
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


def _seen(q, k, cu_seqlens_q, cu_seqlens_k, left, right, top_left):
    """[Sq, Sk] bool: which keys each query sees."""
    queries, keys = q.shape[-2], k.shape[-2]
    i, j = torch.arange(queries, device=q.device), torch.arange(keys, device=q.device)
    if cu_seqlens_q is None:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        at = i + (0 if top_left else keys - queries)
        return _in_window(seen, at[:, None], j, left, right)
    (q_of, i), (k_of, j) = _places(cu_seqlens_q, i), _places(cu_seqlens_k, j)
    lengths = F.pad(cu_seqlens_k.diff() - cu_seqlens_q.diff(), (0, 1))  # 0 past the last sequence
    seen = (q_of[:, None] == k_of) & (q_of[:, None] >= 0)
    at = i if top_left else i + lengths[q_of]
    return _in_window(seen, at[:, None], j, left, right)


def _places(cu_seqlens, tokens):
    """Each token's sequence (-1 past the last one) and its position in it."""
    cu_seqlens = cu_seqlens.long()
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    place = tokens - cu_seqlens[sequence]
    return torch.where(sequence < cu_seqlens.shape[0] - 1, sequence, -1), place


def _in_window(seen, at, j, left, right):
    seen = seen if left < 0 else seen & (j >= at - left)
    return seen if right < 0 else seen & (j <= at + right)


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
    """Gathers the blocks and hides unused keys. Packed queries see one row of all sequences."""
    used = seqused_k.long()[:, None]
    if block_table is not None:
        k, v = (_gathered(t, block_table.long()) for t in (k, v))
    j = torch.arange(k.shape[2], device=q.device)
    used = used.clamp(0, k.shape[2])
    exists = j < used  # [B, Sk]
    k, v = (torch.where(exists[:, None, :, None], t, 0) for t in (k, v))
    if cu_seqlens_q is None:
        at = torch.arange(q.shape[2], device=q.device) + used - q.shape[2]
        seen = exists[:, None]
    else:
        sequence, place = _places(cu_seqlens_q, torch.arange(q.shape[0], device=q.device))
        more = F.pad(used[:, 0] - cu_seqlens_q.long().diff(), (0, 1))
        at = (place + more[sequence])[:, None]
        seen = exists & (sequence[:, None] == torch.arange(len(used), device=q.device))[..., None]
        q = q.transpose(0, 1)[None]
        k, v = (t.transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
    left, right = (-1, -1) if window is None else window
    seen = _in_window(seen, at[..., None], j, left, 0 if causal else right)
    seen = seen[:, None] if cu_seqlens_q is None else seen.flatten(1)
    out, lse = attention_reference(q, k, v, softcap=softcap, sinks=sinks, bias=seen, scale=scale)
    if cu_seqlens_q is None:
        return out, lse
    return out[0].transpose(0, 1), _without_padding(lse[0], cu_seqlens_q)


def _gathered(cache, block_table):
    """Each sequence's blocks, [B, Hkv, blocks block_size, D], from [blocks, block_size, Hkv, D]."""
    if cache.shape[0] == 0:
        cache = cache.new_zeros(1, *cache.shape[1:])
    return cache[block_table.clamp(0, cache.shape[0] - 1)].flatten(1, 2).transpose(1, 2)
