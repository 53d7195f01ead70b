"""What both directions share: the tile of a program, the dropout, the weight and the bias."""

import functools

import triton
import triton.language as tl
from torch import Tensor

LOOP_BLOCK = 8192  # of rows that do not fit
# 128 registers: 16 warps fill a multiprocessor. Fusion is triton's default, which 3.9 warns about.
OPTIONS = {"maxnreg": 128, "enable_fp_fusion": True}


@functools.cache
def tile_of(n: int, longest: int) -> dict[str, int | bool]:
    """The tile for rows of n, and how to compile it: 8 to 32 elements a thread.

    A quarter of them, and of the longest row, where a row is not whole vectors: each element then
    needs an address of its own.
    """
    parts = 1 if n % 16 == 0 else 4
    fits = n * parts <= longest
    block = max(triton.next_power_of_2(n), 16) if fits else LOOP_BLOCK // parts
    rows = min(max(1024 // block, 1), 32)
    num_warps = min(max(rows * block * parts // 512, 4), 16)
    return {"ROWS": rows, "BLOCK": block, "LOOP": not fits, "num_warps": num_warps, **OPTIONS}


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def dropout_arguments(p: float, seed: Tensor | None) -> tuple[Tensor | None, int, float]:
    """(seed, threshold, scale) of the kernels; without dropout they compile without a seed."""
    if p == 0:
        return None, 0, 1.0
    return seed, min(int(p * 2**32), 2**32 - 1), 0.0 if p == 1 else 1 / (1 - p)


@triton.jit
def dropout(t, seed, threshold, scale, row, start, BLOCK: tl.constexpr):
    """A tile, [ROWS, BLOCK], after dropout; as it is without a seed. row: [ROWS, 1] int64.

    One Philox counter gives four columns. The interleaving moves nothing between threads: a
    thread owns all four.
    """
    if seed is not None:
        group = start // 4 + tl.arange(0, BLOCK // 4)[None, :] + tl.zeros_like(row).to(tl.int32)
        zero = tl.zeros_like(group)
        low, high = zero + row.to(tl.int32), zero + (row >> 32).to(tl.int32)
        a, b, c, d = tl.philox(tl.load(seed), group, low, high, zero, n_rounds=7)
        even = tl.interleave(a >= threshold, c >= threshold)
        odd = tl.interleave(b >= threshold, d >= threshold)
        t *= tl.where(tl.interleave(even, odd), scale, 0.0)  # a dropped NaN is NaN
    return t


@triton.jit
def load_row(t, col, live, OFFSET: tl.constexpr = 0):
    """OFFSET + t of a tile's columns, [ROWS, BLOCK] float32.

    Each thread loads what it needs: a [1, BLOCK] load would go through shared memory.
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
    """c * rstd, for rstd float64 [ROWS, 1]. Where `like` points to float32, rstd keeps a second
    float32 word: its rounding alone would shift the whole row. An infinite c has no use for it:
    the word's sign may be another."""
    high = rstd.to(tl.float32)
    if like.dtype.element_ty == tl.float32:
        rest = c * (rstd - high).to(tl.float32)
        return c * high + tl.where(tl.abs(c) < float("inf"), rest, 0.0)
    return c * high
