"""The rotary embedding in plain PyTorch; the C++ version is in csrc/ops/rotary."""

import functools

import torch
from torch import Tensor

from fusedops.uncompiled.checks import check_floating, check_same_device, describe, widest
from fusedops.uncompiled.library import define, implement, implement_kernel, reference

OP = "rotary_embedding"

define(
    "rotary_embedding(Tensor q, Tensor k, Tensor cos, Tensor sin, *, int unsqueeze_dim=1,"
    " bool interleaved=False) -> (Tensor q_embed, Tensor k_embed)",
    "rotary_forward(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim,"
    " bool interleaved) -> (Tensor q_embed, Tensor k_embed)",
    "rotary_backward(Tensor? dq_embed, Tensor? dk_embed, Tensor cos, Tensor sin,"
    " int unsqueeze_dim, bool interleaved, ScalarType dtype) -> (Tensor dq, Tensor dk)",
)


def rotary_embedding(q, k, cos, sin, *, unsqueeze_dim=1, interleaved=False):
    _check(q, k, cos, sin, unsqueeze_dim)
    wide, n = widest((q, k, cos, sin)), cos.shape[-1]
    run = reference("rotary", "rotary_embedding_reference")
    tensors = (t.to(wide) for t in (q[..., :n], k[..., :n], cos, sin))
    rotated = run(*tensors, unsqueeze_dim=unsqueeze_dim, interleaved=interleaved)
    return tuple(
        _with_rest(y.to(_rotated_dtype(x.dtype, cos, sin)), x[..., n:])
        for x, y in zip((q, k), rotated, strict=True)
    )


def _with_rest(y: Tensor, rest: Tensor) -> Tensor:
    """y, followed by each head's elements that are not rotated."""
    if not rest.shape[-1]:
        return y
    return torch.cat([y, rest.to(y.dtype).expand(*y.shape[:-1], -1)], -1)


def _rotated_dtype(dtype: torch.dtype, cos: Tensor, sin: Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, (dtype, cos.dtype, sin.dtype))


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    check_floating(OP, "cos", cos)
    check_floating(OP, "sin", sin)
    if not cos.dim() or cos.shape[-1] % 2:
        raise RuntimeError(
            f"{OP}: cos must have a last dimension of even size, got {describe(cos)}"
        )
    if sin.shape != cos.shape:
        raise RuntimeError(
            f"{OP}: sin must have shape {list(cos.shape)} like cos, got {describe(sin)}"
        )
    first, last = -cos.dim() - 1, cos.dim() - 1
    if unsqueeze_dim == -1 or not first <= unsqueeze_dim <= last:
        raise ValueError(
            f"{OP}: unsqueeze_dim must be a dimension before the last of {describe(cos)}, from "
            f"{first} to {last} and not -1, got {unsqueeze_dim}"
        )
    check_same_device(OP, "sin", sin, "cos", cos)
    for name, x in (("q", q), ("k", k)):
        _check_heads(name, x, cos, unsqueeze_dim)


def _check_heads(name: str, x: Tensor, cos: Tensor, unsqueeze_dim: int) -> None:
    check_floating(OP, name, x)
    check_same_device(OP, name, x, "cos", cos)
    if not x.dim() or x.shape[-1] < cos.shape[-1]:
        raise RuntimeError(
            f"{OP}: {name} must have at least {cos.shape[-1]} elements in its last dimension like "
            f"cos, got {describe(x)}"
        )
    of_cos = list(cos.shape)
    of_cos.insert(unsqueeze_dim % (cos.dim() + 1), 1)
    pairs = zip(reversed(x.shape[:-1]), reversed(of_cos[:-1]), strict=False)
    if not all(a == b or a == 1 or b == 1 for a, b in pairs):
        raise RuntimeError(
            f"{OP}: {name} must broadcast with cos, {describe(cos)} unsqueezed at {unsqueeze_dim}, "
            f"got {describe(x)}"
        )


def _outputs(q, k, cos, sin, unsqueeze_dim, interleaved):
    _check(q, k, cos, sin, unsqueeze_dim)
    q_out, k_out = (x.new_empty(x.shape, dtype=_rotated_dtype(x.dtype, cos, sin)) for x in (q, k))
    return q_out, k_out


def _backward_outputs(dq, dk, cos, sin, unsqueeze_dim, interleaved, dtype):
    return tuple(None if d is None else d.new_empty(d.shape, dtype=dtype) for d in (dq, dk))


implement("rotary_embedding", rotary_embedding)
implement_kernel("rotary_forward", _outputs)
implement_kernel("rotary_backward", _backward_outputs)
