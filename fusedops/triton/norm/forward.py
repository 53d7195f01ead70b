"""Triton norm_forward: h = residual + dropout(x), its statistics and normalized rows.

A program has ROWS rows. It reads a row longer than the tile twice, the second time from h, or from
x without a residual.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.extension import _C
from fusedops.triton.norm.tile import (
    centred,
    contiguous,
    load_row,
    scaled,
    tile_of,
)
from fusedops.triton.tile import composite, dropout, dropout_arguments, launched

LONGEST = 16384  # 32 elements per thread: the longest row that fits in registers


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    dims: int,
    eps: float,
    kind: str,
    offset: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The operator fusedops::norm_forward; see csrc/ops/norm/operators.h.

    Returns (y, h, stats); h is None without a residual.
    """
    y, h, stats = _C.norm_outputs(
        x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed
    )
    if y.numel() == 0:
        return y, h, stats
    rows = stats.shape[1]
    n = y.numel() // rows
    tile = tile_of(n, LONGEST)
    with torch.accelerator.device_index(x.device.index):
        forward_kernel[(-(-rows // tile["ROWS"]),)](
            contiguous(x),
            contiguous(residual),
            contiguous(weight),
            contiguous(bias),
            y,
            h,
            stats,
            *dropout_arguments(dropout_p, seed),
            eps,
            rows,
            n,
            kind,
            offset,
            **tile,
        )
    return y, h, stats


def norm_quantized(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """fusedops::norm_quantized, (codes, scale, h), by ATen calls: only csrc/cuda has a kernel."""
    return composite(torch.ops.fusedops.norm_quantized.default, *arguments)


@launched
@triton.jit(do_not_specialize=["threshold", "rows"])
def forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    h,
    stats,
    seed,
    threshold: tl.uint32,
    scale,
    eps,
    rows,
    n,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if LOOP:
        mean, m2 = _long_moments(x, residual, h, seed, threshold, scale, row, rows, n, KIND, BLOCK)
        mean, rstd = _store_statistics(stats, row, rows, mean, m2 / n, eps, KIND)
    for start in range(0, n if LOOP else 1, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        live = (row < rows) & (col < n)
        if LOOP:
            s = tl.load((x if h is None else h) + row * n + col, live, 0).to(tl.float32)
        else:
            s = _stream(x, residual, h, seed, threshold, scale, row, start, live, n, BLOCK)
            mean, m2 = _moments(s, live, n, KIND)
            mean, rstd = _store_statistics(stats, row, rows, mean, m2 / n, eps, KIND)
        out = scaled(centred(s, mean, KIND, y), rstd, y)
        if KIND == "rms_llama":
            out = _round(out, x, h, weight)
        if weight is not None:
            out *= load_row(weight, col, live, OFFSET)
        if bias is not None:
            out += load_row(bias, col, live)
        tl.store(y + row * n + col, out.to(y.dtype.element_ty), live)


@triton.jit
def _stream(x, residual, h, seed, threshold, scale, row, start, live, n, BLOCK: tl.constexpr):
    """A tile of h, [ROWS, BLOCK] float32, rounded to its dtype; stored unless it is x."""
    at = row * n + start + tl.arange(0, BLOCK)[None, :]
    s = tl.load(x + at, live, 0).to(tl.float32)
    s = dropout(s, seed, threshold, scale, row, start, BLOCK)
    if residual is not None:
        s += tl.load(residual + at, live, 0).to(tl.float32)
        rounded = s.to(h.dtype.element_ty)
        tl.store(h + at, rounded, live)
        s = rounded.to(tl.float32)
    return s


@triton.jit
def _moments(s, live, count, KIND: tl.constexpr):
    """[ROWS, 1]: the mean (float64) and the sum of squares around it (around 0 for RMS).

    A float32 sum is not exact, so the mean of the differences from a first mean corrects both.
    """
    mean = tl.zeros([s.shape[0], 1], tl.float64)
    m2 = tl.sum(s * s, 1, keep_dims=True)
    if KIND == "layer":
        first = tl.sum(s, 1, keep_dims=True) / count
        c = tl.where(live, s - first, 0)
        rest = (tl.sum(c, 1, keep_dims=True) / count).to(tl.float64)  # its square may overflow
        m2 = (tl.sum(c * c, 1, keep_dims=True) - count * rest * rest).to(tl.float32)
        m2 = tl.where(m2 < 0, 0, m2)  # equal elements; a NaN stays
        mean = first.to(tl.float64) + rest
    return mean, m2


@triton.jit
def _long_moments(
    x,
    residual,
    h,
    seed,
    threshold,
    scale,
    row,
    rows,
    n,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """_moments for rows longer than a block, merged block by block (Chan et al., 1979)."""
    mean = tl.zeros_like(row).to(tl.float64)
    m2 = mean.to(tl.float32)
    for start in range(0, n, BLOCK):
        live = (row < rows) & (start + tl.arange(0, BLOCK)[None, :] < n)
        s = _stream(x, residual, h, seed, threshold, scale, row, start, live, n, BLOCK)
        count = tl.minimum(n - start, BLOCK)
        block_mean, block_m2 = _moments(s, live, count, KIND)
        delta = block_mean - mean
        share = count / (start + count)
        mean += delta * share
        m2 += block_m2 + (delta * delta * start * share).to(tl.float32)
    tl.debug_barrier()  # the second pass may read an element of h in another thread than wrote it
    return mean, m2


@triton.jit
def _store_statistics(stats, row, rows, mean, var, eps, KIND: tl.constexpr):
    """stats: [mean, rstd] per row, without the mean for RMS. Returns both, float64."""
    v = var + eps
    rstd = tl.rsqrt(v).to(tl.float64)
    better = rstd * (1.5 - 0.5 * v * rstd * rstd)  # one Newton step: float64 from float32
    rstd = tl.where(rstd == 0, rstd, better)  # an infinite row
    if KIND == "layer":
        tl.store(stats + row, mean, row < rows)
        stats += rows
    tl.store(stats + row, rstd, row < rows)
    return mean, rstd


@triton.jit
def _round(out, x, h, weight):
    """The llama rounding: to x's dtype, or to h's if the weight has it too (float32 stream)."""
    if h is not None and weight is not None and weight.dtype.element_ty == h.dtype.element_ty:
        rounded = out.to(h.dtype.element_ty)
    else:
        rounded = out.to(x.dtype.element_ty)
    return rounded.to(tl.float32)
