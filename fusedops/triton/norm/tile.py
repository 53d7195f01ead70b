"""Triton norm helpers: a program's tile, weight and bias loads, normalization."""

import functools

import triton
import triton.language as tl
from torch import Tensor

LOOP_BLOCK = 8192  # for rows that do not fit
# 128 registers: 16 warps fill a multiprocessor. Fusion is Triton's default; 3.9 warns about it.
OPTIONS = {"maxnreg": 128, "enable_fp_fusion": True}


@functools.cache
def tile_of(n: int, longest: int) -> dict[str, int | bool]:
    """The tile for rows of n, and compile options: 8 to 32 elements per thread.

    If a row is not whole vectors, each element needs its own address; then both this number and the
    longest row are a quarter.
    """
    parts = 1 if n % 16 == 0 else 4
    fits = n * parts <= longest
    block = max(triton.next_power_of_2(n), 16) if fits else LOOP_BLOCK // parts
    rows = min(max(1024 // block, 1), 32)
    num_warps = min(max(rows * block * parts // 512, 4), 16)
    return {"ROWS": rows, "BLOCK": block, "LOOP": not fits, "num_warps": num_warps, **OPTIONS}


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


@triton.jit
def load_row(t, col, live, OFFSET: tl.constexpr = 0):
    """OFFSET + t for a tile's columns, [ROWS, BLOCK] float32.

    Each thread loads its own columns: a [1, BLOCK] load would go through shared memory.
    """
    return OFFSET + tl.load(t + tl.broadcast_to(col, live.shape), live, 0).to(tl.float32)


@triton.jit
def centred(s, mean, KIND: tl.constexpr, like):
    """s - mean for LayerNorm. mean: float64 [ROWS, 1]; see `scaled` for its second word."""
    if KIND == "layer":
        high = mean.to(tl.float32)
        s -= high
        if like.dtype.element_ty == tl.float32:
            s -= (mean - high).to(tl.float32)
    return s


@triton.jit
def scaled(c, rstd, like):
    """c * rstd, for rstd float64 [ROWS, 1].

    If `like` points to float32, rstd's second float32 word is used too: its rounding alone would
    shift the whole row. An infinite c does not use it, because the word's sign may differ.
    """
    high = rstd.to(tl.float32)
    if like.dtype.element_ty == tl.float32:
        rest = c * (rstd - high).to(tl.float32)
        return c * high + tl.where(tl.abs(c) < float("inf"), rest, 0.0)
    return c * high
