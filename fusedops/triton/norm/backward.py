"""Triton norm_backward: gradients of the input, residual, weight and bias of a norm.

One pass over dy, h and dh; dy and h of long rows are read twice. A persistent grid: each program
takes every programs-th tile of rows and sums dweight and dbias over them in float32. A second
kernel adds these partial rows in a fixed order, without atomics, so every run gives the same bits.
If there are only a few rows, one program handles them all and the second kernel is not needed.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.extension import _C
from fusedops.triton.norm.tile import (
    OPTIONS,
    centred,
    contiguous,
    load_row,
    scaled,
    tile_of,
)
from fusedops.triton.tile import dropout, dropout_arguments, launched

LONGEST = 8192  # per thread, 16 elements each of dy, h, dweight and dbias
REDUCE_ROWS, REDUCE_COLS = 64, 32


def norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    dims: int,
    eps: float,
    kind: str,
    offset: float,
    dropout_p: float,
    seed: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """The operator fusedops::norm_backward; see csrc/ops/norm/operators.h.

    Returns (dresidual, dx, dweight, dbias), None where output_mask is False.
    """
    outputs = _C.norm_backward_outputs(
        dy, dh, h, weight, bias, stats, dims, eps, kind, offset, dropout_p, seed, output_mask
    )
    dresidual, dx, *totals = outputs
    if dy.numel() == 0:
        for total in totals:
            if total is not None:
                total.zero_()
        return outputs
    rows = stats.shape[1]
    n = dy.numel() // rows
    tile = tile_of(n, LONGEST)
    programs = _programs(dy.device, rows, tile)
    partial = _partial_rows(totals, programs, n)
    with torch.accelerator.device_index(dy.device.index):
        backward_kernel[(programs,)](
            contiguous(dy),
            contiguous(dh),
            contiguous(h),
            contiguous(weight),
            stats,
            dresidual,
            dx,
            *partial,
            *dropout_arguments(dropout_p, seed),
            rows,
            n,
            kind,
            offset,
            **tile,
        )
        if partial is not totals:
            grid = (-(-n // REDUCE_COLS),)
            reduce_kernel[grid](*partial, *totals, programs, n, REDUCE_ROWS, REDUCE_COLS, **OPTIONS)
    return outputs


def _programs(device: torch.device, rows: int, tile: dict) -> int:
    """As many as run at once, with 16 warps per multiprocessor; 1 if a second launch costs more."""
    steps = -(-rows // tile["ROWS"])
    if steps <= (1 if tile["LOOP"] else 4):
        return 1
    return min(steps, _multiprocessors(device) * 16 // tile["num_warps"])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 2  # in the interpreter, fewer programs are faster, but test more than one
    return torch.cuda.get_device_properties(device).multi_processor_count


def _partial_rows(totals: list[Tensor | None], programs: int, n: int) -> list[Tensor | None]:
    """Memory for the programs' sums, [programs, n] float32; one program writes the totals."""
    if programs == 1 or all(t is None for t in totals):
        return totals
    return [t if t is None else t.new_empty((programs, n), dtype=torch.float32) for t in totals]


@launched
@triton.jit(do_not_specialize=["threshold", "rows"])
def backward_kernel(
    dy,
    dh,
    h,
    weight,
    stats,
    dresidual,
    dx,
    dweight,
    dbias,
    seed,
    threshold: tl.uint32,
    scale,
    rows,
    n,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    total = tl.program_id(0).to(tl.int64) * n  # this program's partial row
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for top in range(first, rows, tl.num_programs(0) * ROWS):
        row = top + tl.arange(0, ROWS)[:, None]
        if LOOP:
            g1, g2 = _long_means(dy, h, weight, stats, row, rows, n, KIND, OFFSET, BLOCK)
        for start in range(0, n if LOOP else 1, BLOCK):
            col = start + tl.arange(0, BLOCK)[None, :]
            at = row * n + col
            live = (row < rows) & (col < n)
            d, g, xhat, rstd = _gradient(dy, h, weight, stats, row, col, rows, n, KIND, OFFSET)
            if not LOOP:
                g1, g2 = _means(g, xhat, n, KIND)
            if dresidual is not None or dx is not None:
                grad = scaled(g - g1 - xhat * g2, rstd, h)
                if dh is not None:
                    grad += tl.load(dh + at, live, 0).to(tl.float32)
                if dresidual is not None:
                    tl.store(dresidual + at, grad.to(dresidual.dtype.element_ty), live)
                if dx is not None:
                    grad = dropout(grad, seed, threshold, scale, row, start, BLOCK)
                    tl.store(dx + at, grad.to(dx.dtype.element_ty), live)
            if LOOP:
                again = live & (row >= tl.num_programs(0) * ROWS)
                _add_to(dweight, total + col, live, d * xhat, again)
                _add_to(dbias, total + col, live, d, again)
            else:
                dw += d * xhat
                db += d
    if not LOOP:
        col = tl.arange(0, BLOCK)[None, :]
        _add_to(dweight, total + col, col < n, _over_rows(dw), None)
        _add_to(dbias, total + col, col < n, _over_rows(db), None)


@triton.jit
def _over_rows(t):
    """[1, columns] float32: the sum over rows, in float64.

    If many rows cancel, a float32 sum would lose more than eager's does.
    """
    return tl.sum(t.to(tl.float64), 0, keep_dims=True).to(tl.float32)


@triton.jit
def _gradient(dy, h, weight, stats, row, col, rows, n, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """dy, dy times the weight, the normalized h ([ROWS, BLOCK] float32); rstd [ROWS, 1] float64."""
    live = (row < rows) & (col < n)
    d = tl.load(dy + row * n + col, live, 0).to(tl.float32)
    s = tl.load(h + row * n + col, live, 0).to(tl.float32)
    if KIND == "layer":
        s = centred(s, tl.load(stats + row, row < rows, 0), KIND, h)
        stats += rows
    rstd = tl.load(stats + row, row < rows, 0)
    g = d
    if weight is not None:
        g = d * load_row(weight, col, live, OFFSET)
    return d, g, scaled(s, rstd, h), rstd


@triton.jit
def _means(g, xhat, n, KIND: tl.constexpr):
    """[ROWS, 1]: the means of g (0 for the RMS kinds) and of g * xhat."""
    g1 = tl.zeros([g.shape[0], 1], tl.float32)
    if KIND == "layer":
        g1 = tl.sum(g, 1, keep_dims=True) / n
    return g1, tl.sum(g * xhat, 1, keep_dims=True) / n


@triton.jit
def _long_means(
    dy,
    h,
    weight,
    stats,
    row,
    rows,
    n,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """_means for rows longer than a block, block by block."""
    g1 = tl.zeros_like(row).to(tl.float32)
    g2 = g1
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        _, g, xhat, _ = _gradient(dy, h, weight, stats, row, col, rows, n, KIND, OFFSET)
        block_g1, block_g2 = _means(g, xhat, n, KIND)
        g1 += block_g1
        g2 += block_g2
    return g1, g2


@triton.jit
def _add_to(total, at, live, share, again):
    """total[at] = share, plus the old value if `again`; does nothing without a total."""
    if total is not None:
        if again is not None:
            share += tl.load(total + at, again, 0).to(tl.float32)
        tl.store(total + at, share.to(total.dtype.element_ty), live)


@launched
@triton.jit(do_not_specialize=["programs"])
def reduce_kernel(
    dweight_rows,
    dbias_rows,
    dweight,
    dbias,
    programs,
    n,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Adds the partial rows, [programs, n]. A program walks down COLS columns."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    _sum_rows(dweight_rows, dweight, programs, n, col, ROWS, COLS)
    _sum_rows(dbias_rows, dbias, programs, n, col, ROWS, COLS)


@triton.jit
def _sum_rows(partial, out, programs, n, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    if out is not None:
        acc = tl.zeros([ROWS, COLS], tl.float64)
        for top in range(0, programs, ROWS):
            row = top + tl.arange(0, ROWS)[:, None]
            live = (row < programs) & (col < n)
            acc += tl.load(partial + row.to(tl.int64) * n + col, live, 0)
        tl.store(out + col, _over_rows(acc).to(out.dtype.element_ty), col < n)
