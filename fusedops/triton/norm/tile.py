"""What both directions share: the tile of a program, the weight and the bias."""

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
