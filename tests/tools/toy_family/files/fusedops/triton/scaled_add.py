"""Triton scaled_add: each program reads BLOCK elements once and writes them once.

Formula: functional/scaled_add.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.tile import composite, outputs_of

__all__ = ["scaled_add_backward", "scaled_add_forward"]

BLOCK = 1024


@triton.jit(do_not_specialize=["scale"])
def sum_kernel(x, residual, y, scale, n, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """y = x + scale * residual; y = scale * residual without SUM."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # i exceeds int32
    live = i < n
    r = scale * tl.load(residual + i, live).to(tl.float32)  # [BLOCK]
    if SUM:
        r += tl.load(x + i, live).to(tl.float32)
    tl.store(y + i, r.to(y.dtype.element_ty), live)


def _run(x: Tensor | None, residual: Tensor, y: Tensor, scale: float) -> Tensor:
    n = y.numel()
    if n:
        first = residual if x is None else x.contiguous()
        sum_kernel[(triton.cdiv(n, BLOCK),)](
            first, residual.contiguous(), y, scale, n, SUM=x is not None, BLOCK=BLOCK
        )
    return y


def scaled_add_forward(x: Tensor, residual: Tensor, scale: float) -> Tensor:
    operator = torch.ops.fusedops.scaled_add_forward.default
    if x.dtype == torch.float64:
        return composite(operator, x, residual, scale)
    return _run(x, residual, outputs_of(operator, x, residual, scale), scale)


def scaled_add_backward(dy: Tensor, scale: float) -> Tensor:
    operator = torch.ops.fusedops.scaled_add_backward.default
    if dy.dtype == torch.float64:
        return composite(operator, dy, scale)
    return _run(None, dy, outputs_of(operator, dy, scale), scale)
