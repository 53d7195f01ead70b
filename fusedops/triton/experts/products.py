"""Triton experts: grouped matmuls of each expert's rows, and sums of those rows."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.experts.routing import Routing
from fusedops.triton.quantized_linear.codes import INTERPRETING, stored
from fusedops.triton.tile import launched

__all__ = ["outer", "product", "sums_of_rows"]

FEW = 16  # average rows of an expert up to which tiles have as few
# No GPU was available to time any of this.
WIDE = {"N": 64, "K": 32, "num_warps": 4, "num_stages": 2}  # float32
NARROW = {"N": 128, "K": 64, "num_warps": 8, "num_stages": 3}
INTERPRETED = {"N": 128, "K": 128, "num_warps": 4, "num_stages": 1}


@triton.jit
def multiplied(a, b, sums):
    """sums + a b. The interpreter cannot multiply bfloat16; float32 rounds like eager's."""
    if INTERPRETING:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@launched
@triton.jit
def product_kernel(
    x,
    order,
    w,
    bias,
    out,
    tiles,
    plan,
    experts,
    choices,
    n,
    depth,
    x_row,
    w_expert,
    w_row,
    w_column,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Program (c, t): tile t's rows of out, [M, N] at column c N. x is gathered if order is given.

    Rows without expert become zeros.
    """
    tile = tl.program_id(1)
    expert = tl.load(plan + tile)
    if expert >= 0:
        first, end = tl.load(plan + tiles + tile), tl.load(plan + 2 * tiles + tile)
        row = first + tl.arange(0, M)
        col = tl.program_id(0) * N + tl.arange(0, N)
        live = row < end
        sums = tl.zeros([M, N], tl.float32)
        if expert < experts:
            from_ = row
            if order is not None:
                from_ = tl.load(order + row, live, 0) // choices
            for start in range(0, depth, K):
                k = start + tl.arange(0, K)
                a = tl.load(
                    x + from_[:, None] * x_row + k[None, :],
                    live[:, None] & (k < depth)[None, :],
                    0.0,
                )
                b = tl.load(
                    w + expert * w_expert + col[None, :] * w_row + k[:, None] * w_column,
                    (col < n)[None, :] & (k < depth)[:, None],
                    0.0,
                )
                sums = multiplied(a, b, sums)
            if bias is not None:
                sums += tl.load(bias + expert * n + col, col < n, 0.0).to(tl.float32)[None, :]
        to = out + row[:, None] * n + col[None, :]
        tl.store(to, stored(sums, out), live[:, None] & (col < n)[None, :])


def product(
    routing: Routing,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gathers: bool = False,
) -> None:
    """out [rows, n] = x w^T, plus a row of bias, for each expert's rows and its w [n, depth].

    x: [rows, depth], or gathers: [tokens, depth]; its rows are contiguous. w: [E, n, depth], any
    strides, of x's dtype. bias: [E, n], contiguous.
    """
    size = tile_of(routing, x.dtype)
    plan = routing.tiles(size["M"])
    tiles, n = plan.shape[1], w.shape[1]
    if not out.numel():
        return
    product_kernel[(-(-n // size["N"]), tiles)](
        x,
        routing.order if gathers else None,
        w,
        bias,
        out,
        tiles,
        plan,
        routing.experts,
        routing.choices,
        n,
        w.shape[2],
        x.stride(0),
        *w.stride(),
        **size,
    )


def tile_of(routing: Routing, dtype: torch.dtype) -> dict[str, Any]:
    """As many rows as an expert has on average, so that the choice needs no synchronization."""
    few, wide = routing.rows <= FEW * max(routing.experts, 1), dtype == torch.float32
    if INTERPRETING:
        return INTERPRETED | {"M": 16 if few else 64}
    return (WIDE if wide else NARROW) | {"M": 16 if few else 32 if wide else 64}


@launched
@triton.jit
def outer_kernel(
    a,
    b,
    order,
    out,
    bounds,
    choices,
    n,
    m,
    a_row,
    b_row,
    out_expert,
    out_row,
    out_column,
    N: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, j, e): [N, M] of expert e's a^T b. b is gathered if order is given."""
    expert = tl.program_id(2).to(tl.int64)
    first, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    i = tl.program_id(0) * N + tl.arange(0, N)
    j = tl.program_id(1) * M + tl.arange(0, M)
    sums = tl.zeros([N, M], tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        live = row < end
        from_ = row
        if order is not None:
            from_ = tl.load(order + row, live, 0) // choices
        left = tl.load(a + row[None, :] * a_row + i[:, None], live[None, :] & (i < n)[:, None], 0.0)
        right = tl.load(
            b + from_[:, None] * b_row + j[None, :], live[:, None] & (j < m)[None, :], 0.0
        )
        sums = multiplied(left, right, sums)
    to = out + expert * out_expert + i[:, None] * out_row + j[None, :] * out_column
    tl.store(to, stored(sums, out), (i < n)[:, None] & (j < m)[None, :])


def outer(routing: Routing, a: Tensor, b: Tensor, out: Tensor, gathers: bool = False) -> None:
    """out [E, n, m], any strides, = a^T b over each expert's rows.

    a: [rows, n]; b: [rows, m], or gathers: [tokens, m]. Rows are contiguous.
    """
    experts, n, m = out.shape
    if not out.numel():
        return
    block = 64 if INTERPRETING or a.dtype != torch.float32 else 32
    outer_kernel[(-(-n // block), -(-m // block), experts)](
        a,
        b,
        routing.order if gathers else None,
        out,
        routing.bounds,
        routing.choices,
        n,
        m,
        a.stride(0),
        b.stride(0),
        *out.stride(),
        N=block,
        M=block,
        ROWS=32,
        num_warps=4,
    )


@launched
@triton.jit
def sums_kernel(rows, weights, out, bounds, n, N: tl.constexpr, ROWS: tl.constexpr):
    """Program (c, e): the sums of expert e's rows, times their weights if given."""
    expert = tl.program_id(1).to(tl.int64)
    first, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    col = tl.program_id(0) * N + tl.arange(0, N)
    sums = tl.zeros([N], tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        live = (row < end)[:, None] & (col < n)[None, :]
        v = tl.load(rows + row[:, None] * n + col[None, :], live, 0.0).to(tl.float32)
        if weights is not None:
            v *= tl.load(weights + row, row < end, 0.0)[:, None]
            v = stored(v, rows).to(tl.float32)
        sums += tl.sum(v, 0)
    tl.store(out + expert * n + col, stored(sums, out), col < n)


def sums_of_rows(routing: Routing, rows: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """out [E, n] = the sums of each expert's rows [rows, n], weighted if weights [rows] are."""
    experts, n = out.shape
    if out.numel():
        sums_kernel[(-(-n // 64), experts)](
            rows, weights, out, routing.bounds, n, N=64, ROWS=16, num_warps=4
        )
