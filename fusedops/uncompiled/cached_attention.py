"""cached_attention in plain PyTorch; the C++ version is csrc/ops/attention/cached.cpp."""

import math

import torch
from torch import Tensor

from fusedops.uncompiled.attention import (
    OP,
    WIDEST,
    check_cu_seqlens,
    check_dims,
    check_group,
    check_options,
    check_sequences,
    check_sinks,
    empty_outputs,
)
from fusedops.uncompiled.checks import (
    check_floating,
    check_same_device,
    describe,
    has_numbers,
    widened,
)
from fusedops.uncompiled.library import (
    define,
    has_kernel,
    implement,
    implement_autocast,
    implement_kernel,
    needs_gradient,
    reference,
)

define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor seqused_k, *, Tensor? block_table=None,"
    " bool causal=False, int[]? window=None, float? softcap=None, Tensor? sinks=None,"
    " float? scale=None, Tensor? cu_seqlens_q=None) -> (Tensor out, Tensor lse)",
    "cached_attention_forward(Tensor q, Tensor k, Tensor v, Tensor seqused_k, Tensor? block_table,"
    " Tensor? sinks, Tensor? cu_seqlens_q, float[] scalars, int[] window)"
    " -> (Tensor out, Tensor lse)",
)


def cached_attention(
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
    packed, paged = cu_seqlens_q is not None, block_table is not None
    check_dims(q, packed)
    check_options(0.0, softcap, window)
    left, right = (-1, -1) if window is None else (min(side, WIDEST) for side in window)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    q = q.transpose(0, 1)[None] if packed else q
    k, v = (t.transpose(1, 2) if paged and t.dim() == 4 else t for t in (k, v))
    call = (
        *(q, k, v, seqused_k, block_table, sinks, cu_seqlens_q),
        *([scale, softcap or 0.0], [left, 0 if causal else right]),
    )
    floating = q, k, v, sinks
    if has_kernel("cached_attention_forward", *floating) and not needs_gradient(*floating):
        out, lse = torch.ops.fusedops.cached_attention_forward(*call)
    else:
        out, lse = _forward(*call)
    return (out[0].transpose(0, 1), lse[0]) if packed else (out, lse)


def _forward(q, k, v, seqused_k, block_table, sinks, cu_seqlens_q, scalars, window):
    """Runs the reference in float32 (float64 for float64)."""
    _check(q, k, v, seqused_k, block_table, sinks, cu_seqlens_q)
    packed, wide = cu_seqlens_q is not None, widened(q.dtype)
    k, v = (t if block_table is None else t.transpose(1, 2) for t in (k, v))
    scale, softcap = scalars
    out, lse = reference(OP, "cached_attention_reference")(
        (q[0].transpose(0, 1) if packed else q).to(wide),
        k.to(wide),
        v.to(wide),
        seqused_k,
        block_table=block_table,
        window=window,
        softcap=softcap or None,
        sinks=sinks,
        scale=scale,
        cu_seqlens_q=cu_seqlens_q,
    )
    out, lse = (out.transpose(0, 1)[None], lse[None]) if packed else (out, lse)
    return out.to(q.dtype), lse.double()


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None:
    check_floating(OP, "q", q)
    paged = block_table is not None
    _check_cache("k", k, q, paged, wide=True)
    _check_cache("v", v, q, paged, wide=False)
    if k.shape[:3] != v.shape[:3]:
        raise RuntimeError(
            f"{OP}: v must have k's shape except for the width, {describe(_as_passed(k, paged))}, "
            f"got {describe(_as_passed(v, paged))}"
        )
    check_group(q, k)
    check_sinks(sinks, q)
    _check_integers("seqused_k", seqused_k, q, 1, "[sequences]")
    sequences = seqused_k.shape[0]
    if cu_seqlens_q is not None:
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
        if cu_seqlens_q.shape[0] != sequences + 1:
            raise RuntimeError(
                f"{OP}: cu_seqlens_q must be [{sequences + 1}] for the {sequences} sequences of "
                f"seqused_k, got {describe(cu_seqlens_q)}"
            )
        check_sequences("cu_seqlens_q", cu_seqlens_q, q.shape[2])
    elif q.shape[0] != sequences:
        raise RuntimeError(
            f"{OP}: seqused_k must be one number per batch entry of q, [{q.shape[0]}], got "
            f"{describe(seqused_k)}"
        )
    if block_table is None:
        if k.shape[0] != sequences:
            raise RuntimeError(
                f"{OP}: k must have the {sequences} sequences of seqused_k, got {describe(k)}"
            )
    else:
        _check_integers("block_table", block_table, q, 2, "[sequences, blocks]")
        if block_table.shape[0] != sequences:
            raise RuntimeError(
                f"{OP}: block_table must have a row for each of the {sequences} sequences of "
                f"seqused_k, got {describe(block_table)}"
            )
        if not k.shape[2]:
            raise RuntimeError(
                f"{OP}: k must have blocks of one key or more, got {describe(_as_passed(k, True))}"
            )
    _check_numbers(k, seqused_k, block_table)


def _as_passed(t: Tensor, paged: bool) -> Tensor:
    return t.transpose(1, 2) if paged and t.dim() == 4 else t


def _check_cache(name: str, t: Tensor, q: Tensor, paged: bool, wide: bool) -> None:
    check_same_device(OP, name, t, "q", q)
    if t.dim() == 4 and t.dtype == q.dtype and (not wide or t.shape[3] == q.shape[3]):
        return
    shape = "[blocks, block_size, heads, " if paged else "[batch, heads, keys, "
    shape += "width] of q's dtype and width, " if wide else "any width] of q's dtype, "
    raise RuntimeError(
        f"{OP}: {name} must be {shape}{describe(q)}, got {describe(_as_passed(t, paged))}"
    )


def _check_integers(name: str, t: Tensor, q: Tensor, dims: int, shape: str) -> None:
    check_same_device(OP, name, t, "q", q)
    if t.dim() != dims or t.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{OP}: {name} must be int32 or int64 {shape}, got {describe(t)}")


def _check_numbers(k: Tensor, seqused_k: Tensor, block_table: Tensor | None) -> None:
    """Checks the numbers on CPUs only: a GPU would have to be waited for."""
    if not has_numbers(seqused_k):
        return
    blocks, size = k.shape[0], k.shape[2]
    room = size if block_table is None else block_table.shape[1] * size
    lengths = seqused_k.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise RuntimeError(
                f"{OP}: seqused_k must be from 0 to {room}, the keys that a sequence has room for, "
                f"got {length} at index {b}"
            )
    if block_table is None or not has_numbers(block_table):
        return
    for b, (length, row) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
        for i, block in enumerate(row[: -(-length // size)]):
            if not 0 <= block < blocks:
                raise RuntimeError(
                    f"{OP}: block_table must name blocks from 0 to {blocks - 1} where seqused_k "
                    f"has keys, got {block} at [{b}, {i}]"
                )


def _autocast(cast, q, k, v, *args, **kwargs):
    return torch.ops.fusedops.cached_attention(cast(q), cast(k), cast(v), *args, **kwargs)


def _outputs(q, k, v, seqused_k, block_table, sinks, cu_seqlens_q, *rest):
    _check(q, k, v, seqused_k, block_table, sinks, cu_seqlens_q)
    return empty_outputs(q, v)


implement("cached_attention", cached_attention)
implement_autocast("cached_attention", _autocast, "cpu", "cuda")
implement_kernel("cached_attention_forward", _outputs, _forward)
