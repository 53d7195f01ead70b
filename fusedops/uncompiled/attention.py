"""attention in plain PyTorch; the C++ version is in csrc/ops/attention."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.uncompiled.checks import (
    check_floating,
    check_same_device,
    describe,
    dtype_name,
    has_numbers,
    widened,
)
from fusedops.uncompiled.library import (
    RANDOM,
    define,
    draw_seed,
    has_kernel,
    implement,
    implement_autocast,
    implement_kernel,
    needs_gradient,
    reference,
    with_graph,
)

OP = "attention"
WIDEST = 1 << 61  # of a window: no sum of places overflows

define(
    "attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, int[]? window=None,"
    " float? softcap=None, Tensor? sinks=None, Tensor? bias=None, float? scale=None,"
    " float dropout_p=0.0, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
    " SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, bool top_left=False)"
    " -> (Tensor out, Tensor lse)",
    tags=RANDOM,
)
define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, SymInt max_q, SymInt max_k,"
    " float[] scalars, int[] window, bool bottom_right) -> (Tensor out, Tensor lse)",
    "attention_backward(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias,"
    " Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, Tensor out,"
    " Tensor lse, SymInt max_q, SymInt max_k, float[] scalars, int[] window, bool bottom_right,"
    " bool[5] output_mask)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
)


def attention(
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
):
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    check_dims(q, varlen, k, v)
    check_options(dropout_p, softcap, window)
    heads = [t.transpose(0, 1)[None] for t in (q, k, v)] if varlen else [q, k, v]
    check(heads[0], heads[1], heads[2], bias, sinks, cu_seqlens_q, cu_seqlens_k)
    left, right = (-1, -1) if window is None else (min(side, WIDEST) for side in window)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    call = _Call(cu_seqlens_q, cu_seqlens_k, draw_seed(q, dropout_p), max_seqlen_q or 0,
                 max_seqlen_k or 0, [scale, softcap or 0.0, dropout_p],
                 [left, 0 if causal else right], not top_left)  # fmt: skip
    tensors = heads[0], heads[1], heads[2], bias, sinks
    if not has_kernel("attention_forward", *tensors):
        out, lse = _formula(*tensors, call)
    elif needs_gradient(*tensors):
        out, lse = _Attention.apply(*tensors, call)
    else:
        out, lse = torch.ops.fusedops.attention_forward(*tensors, *call)
    return (out[0].transpose(0, 1), lse[0]) if varlen else (out, lse)


class _Call(NamedTuple):
    """The arguments of the kernel operators that have no gradient."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    max_q: int
    max_k: int
    scalars: list[float]  # scale, softcap (0: none), dropout_p
    window: list[int]  # left and right, -1 open
    bottom_right: bool


def _formula(q, k, v, bias, sinks, call):
    """Runs the reference on [B, H, S, D] in float32 (float64 for float64). Returns out and lse."""
    varlen = call.cu_seqlens_q is not None
    wide = widened(q.dtype)
    scale, softcap, dropout_p = call.scalars
    out, lse = reference(OP, "attention_reference")(
        *((t[0].transpose(0, 1) if varlen else t).to(wide) for t in (q, k, v)),
        window=call.window,
        softcap=softcap or None,
        sinks=sinks,
        bias=bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype),
        scale=scale,
        dropout_p=dropout_p,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        top_left=not call.bottom_right,
        seed=call.seed,
    )
    out, lse = (out.transpose(0, 1)[None], lse[None]) if varlen else (out, lse)
    return out.to(q.dtype), lse.double()


class _Attention(torch.autograd.Function):
    """The kernels with gradients; see csrc/ops/attention/autograd.cpp."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, call):
        out, lse = torch.ops.fusedops.attention_forward(q, k, v, bias, sinks, *call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, sinks, *call[:3], out, lse)
        ctx.options = call[3:]
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        if grad is None and grad_lse is None:
            return (None,) * 6
        *saved, out, lse = ctx.saved_tensors
        tensors, call = saved[:5], _Call(*saved[5:], *ctx.options)
        if torch.is_grad_enabled():  # a double backward
            formula = functools.partial(_formula, call=call)
            return *with_graph(formula, tensors, (grad, grad_lse)), None
        grad = torch.zeros_like(out) if grad is None else grad
        wanted = list(ctx.needs_input_grad[:5])
        numbers = call[3:]
        run = torch.ops.fusedops.attention_backward
        return *run(grad, grad_lse, *tensors, *call[:3], out, lse, *numbers, wanted), None


# The kernel operators where a device has no kernel for the arguments.


def _forward(q, k, v, bias, sinks, *call):
    check(q, k, v, bias, sinks, *call[:2])
    return _formula(q, k, v, bias, sinks, _Call(*call))


def _backward(
    grad, grad_lse, q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed, out, lse, max_q, max_k,
    scalars, window, bottom_right, output_mask,
):  # fmt: skip
    call = _Call(cu_seqlens_q, cu_seqlens_k, seed, max_q, max_k, scalars, window, bottom_right)
    tensors = [
        t.detach().requires_grad_(wanted) if t is not None and t.is_floating_point() else t
        for t, wanted in zip((q, k, v, bias, sinks), output_mask, strict=True)
    ]
    with torch.enable_grad():
        found = with_graph(functools.partial(_formula, call=call), tensors, (grad, grad_lse))
    return tuple(None if t is None else t.detach() for t in found)


def check_dims(q: Tensor, varlen: bool, *keys: Tensor) -> None:
    wanted = (
        "[tokens, heads, width] with cu_seqlens"
        if varlen
        else "[batch, heads, queries, width] without cu_seqlens"
    )
    if q.dim() != (3 if varlen else 4):
        raise RuntimeError(f"{OP}: q must be {wanted}, got {describe(q)}")
    if varlen and any(t.dim() != 3 for t in keys):
        got = " and ".join(map(describe, keys))
        raise RuntimeError(f"{OP}: k and v must be {wanted}, got {got}")


def check_options(dropout_p: float, softcap: float | None, window: list[int] | None) -> None:
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{OP}: dropout_p must be from 0 to 1, got {dropout_p:g}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"{OP}: softcap must be above 0 and finite, got {softcap:g}")
    if window is not None and (len(window) != 2 or min(window) < -1):
        raise ValueError(
            f"{OP}: window must be (left, right), each -1 (open) or more, got {list(window)}"
        )


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> None:
    check_floating(OP, "q", q)
    _check_heads("k", k, q, "width")
    _check_heads("v", v, q, "any width")
    if v.shape[1:3] != k.shape[1:3]:
        raise RuntimeError(
            f"{OP}: v must have the heads and keys of k, {describe(k)}, got {describe(v)}"
        )
    check_group(q, k)
    if bias is not None:
        _check_bias(bias, q, k)
    check_sinks(sinks, q)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None or cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise RuntimeError(
            f"{OP}: cu_seqlens_q and cu_seqlens_k must come together and count the same sequences"
        )
    check_sequences("cu_seqlens_q", cu_seqlens_q, q.shape[2])
    check_sequences("cu_seqlens_k", cu_seqlens_k, k.shape[2])
    if bias is not None:
        raise RuntimeError(f"{OP}: bias does not go with cu_seqlens, got {describe(bias)}")


def check_group(q: Tensor, k: Tensor) -> None:
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads != heads and (not kv_heads or heads % kv_heads):
        raise RuntimeError(f"{OP}: k's heads must divide q's, {heads}, got {kv_heads}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    check_floating(OP, "sinks", sinks)
    check_same_device(OP, "sinks", sinks, "q", q)
    if list(sinks.shape) != [q.shape[1]]:
        raise RuntimeError(
            f"{OP}: sinks must be one number a head of q, [{q.shape[1]}], got {describe(sinks)}"
        )


def _check_heads(name: str, t: Tensor, q: Tensor, width: str) -> None:
    check_same_device(OP, name, t, "q", q)
    fits = t.dim() == 4 and t.dtype == q.dtype and t.shape[0] == q.shape[0]
    if not fits or (width == "width" and t.shape[3] != q.shape[3]):
        like = "q's dtype, batch and width" if width == "width" else "q's dtype, batch"
        raise RuntimeError(
            f"{OP}: {name} must be [batch, heads, keys, {width}] of {like}, {describe(q)}, got "
            f"{describe(t)}"
        )


def _check_bias(bias: Tensor, q: Tensor, k: Tensor) -> None:
    check_same_device(OP, "bias", bias, "q", q)
    scores = [*q.shape[:3], k.shape[2]]
    pairs = zip(reversed(bias.shape), reversed(scores), strict=False)
    fits = bias.dim() <= 4 and all(n in (1, size) for n, size in pairs)
    if not fits or bias.dtype not in (torch.bool, q.dtype, torch.float32):
        raise RuntimeError(
            f"{OP}: bias must be bool, float32 or of q's dtype, {dtype_name(q.dtype)}, and "
            f"broadcast to the scores {scores}, got {describe(bias)}"
        )


def check_cu_seqlens(name: str, cu: Tensor | None, q: Tensor) -> None:
    if cu is None:
        return
    check_same_device(OP, name, cu, "q", q)
    if cu.dim() != 1 or not cu.numel() or cu.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"{OP}: {name} must be int32 or int64 [sequences + 1], got {describe(cu)}"
        )


def check_sequences(name: str, cu: Tensor, tokens: int) -> None:
    """Checks that the first sequence starts at 0, and each other where the previous one ends."""
    if not has_numbers(cu):
        return
    before = 0
    for i, start in enumerate(cu.tolist()):
        if not (start == 0 if i == 0 else before <= start <= tokens):
            after = f" after {before}" if i else ""
            raise RuntimeError(
                f"{OP}: {name} must grow from 0 to at most {tokens}, the number of tokens, got "
                f"{start} at index {i}{after}"
            )
        before = start


def _autocast(cast, q, k, v, *, bias=None, **kwargs):
    bias = bias if bias is None or bias.dtype == torch.bool else cast(bias)
    return torch.ops.fusedops.attention(cast(q), cast(k), cast(v), bias=bias, **kwargs)


# The outputs that kernels fill: csrc/ops/attention/outputs.cpp.


def _outputs(q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, *rest):
    check(q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k)
    return empty_outputs(q, v)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float64)
    return _empty_heads(q, q.shape[1], v.shape[3]), lse


def _backward_outputs(
    grad, grad_lse, q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed, out, lse, max_q, max_k,
    scalars, window, bottom_right, output_mask,
):  # fmt: skip
    check(q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k)
    wanted = zip((q, k, v, bias, sinks), output_mask, strict=True)
    dq, dk, dv, dbias, dsinks = (t if asked else None for t, asked in wanted)
    return (
        *(None if t is None else _empty_heads(t, t.shape[1], t.shape[3]) for t in (dq, dk, dv)),
        *(None if t is None else t.new_empty(t.shape) for t in (dbias, dsinks)),
    )


def _empty_heads(like: Tensor, heads: int, width: int) -> Tensor:
    """[B, H, S, D] stored in memory as [B, S, H, D], like projections' outputs."""
    return like.new_empty((like.shape[0], like.shape[2], heads, width)).transpose(1, 2)


implement("attention", attention)
implement_autocast("attention", _autocast, "cpu", "cuda")
implement_kernel("attention_forward", _outputs, _forward)
implement_kernel("attention_backward", _backward_outputs, _backward)
