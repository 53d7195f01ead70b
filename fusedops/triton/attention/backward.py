"""Launches Triton attention's backward: gradients of queries, keys, values, bias and sinks.

The first kernel computes the gradient of queries, the second those of keys and values. Both
recompute the scores, so the backward has seven matmuls and the forward two. With
atomics, five would be enough. A bias's gradient is the scores' gradient, summed to the bias's
shape. A sink's gradient is a sum over rows, from the first kernel's delta.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.triton.attention.call import (
    AttentionLaunch,
    has_kernel,
    key_launches,
    query_tile,
    side_by_side,
)
from fusedops.triton.attention.keys import key_kernel
from fusedops.triton.attention.queries import query_kernel
from fusedops.triton.tile import composite, outputs_of

Gradients = tuple[Tensor | None, ...]


def attention_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_q: int,
    max_k: int,
    scalars: Sequence[float],
    window: Sequence[int],
    bottom_right: bool,
    output_mask: Sequence[bool],
) -> Gradients:
    """The operator fusedops::attention_backward; see csrc/ops/attention/operators.h.

    Returns (dq, dk, dv, dbias, dsinks), None where output_mask is False.
    """
    operator = torch.ops.fusedops.attention_backward.default
    tensors = q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed
    numbers = max_q, max_k, scalars, window, bottom_right
    arguments = grad, grad_lse, *tensors, out, lse, *numbers, output_mask
    if not has_kernel(q, v):
        return composite(operator, *arguments)
    gradients = outputs_of(operator, *arguments)
    if cu_seqlens_q is not None:  # tokens outside all sequences
        for gradient in gradients[:3]:
            if gradient is not None:
                gradient.zero_()
    call = AttentionLaunch.of(*tensors, scalars, window, bottom_right)
    with torch.accelerator.device_index(q.device.index):
        run(call, side_by_side(grad), grad_lse, out, lse.contiguous(), gradients)
    return gradients


def run(
    call: AttentionLaunch,
    grad: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    gradients: Gradients,
) -> None:
    dq, dk, dv, dbias, dsinks = gradients
    batch, heads, queries, _ = call.q.shape
    kv_heads, keys = call.k.shape[1:3]
    ds = None if dbias is None else grad.new_zeros((*lse.shape, keys), dtype=torch.float32)
    stats = lse.new_empty((3, *lse.shape), dtype=torch.float32)
    common = (
        call.arguments() | gradient_arguments(grad) | {"scale": call.scalars[0], "stats": stats}
    )
    common["grad_lse"] = None if grad_lse is None else grad_lse.contiguous()
    exact = call.additive or call.q.dtype == torch.float32
    tile = query_tile(call)
    blocks = call.blocks(queries, tile["M"])
    query_kernel[(blocks * batch * heads,)](
        out=in_order(out),
        lse=lse,
        dq=dq,
        ds=ds,
        blocks=blocks,
        EXACT=exact,
        **common,
        **tile,
    )
    del common["sinks"]
    if not exact:  # stats contain it
        common["grad_lse"] = None
    for launch in key_launches(call, dk, dv):
        blocks = call.blocks(keys, launch["N"])
        key_kernel[(blocks * batch * kv_heads,)](blocks=blocks, **common, **launch)
    if dbias is not None and ds is not None:
        dbias.copy_(ds.sum_to_size(dbias.shape))
    if dsinks is not None and call.sinks is not None:
        delta = stats[2] if grad_lse is None or not exact else stats[2] - grad_lse
        dsinks.copy_(gradient_of_sinks(call.sinks, lse, delta))


def gradient_arguments(grad: Tensor) -> dict[str, Any]:
    batch, head, row, _ = grad.stride()
    return {"grad": grad, "grad_batch": batch, "grad_head": head, "grad_row": row}


def in_order(out: Tensor) -> Tensor:
    """Puts out into attention_forward's memory order: heads inside the sequence."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum_i exp(sink - lse_i) delta_i; rows outside all sequences have no delta."""
    row_gradients = torch.exp(sinks[:, None] - lse) * delta
    return -torch.where(lse == -torch.inf, 0, row_gradients).sum((0, 2))
