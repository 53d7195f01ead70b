"""Triton cross-entropy helpers: tile sizes, loads of a row, scaling and capping of logits.

A tile is [UNROLL, LANES, VECTOR] columns of one row. Each thread has VECTOR columns (16 bytes of
logits or gradient) at a time; LANES is the number of threads. So a maximum or sum over the first
and last dimension stays within a thread.
"""

import functools

import triton
import triton.language as tl

from fusedops.triton.tile import tanh

UNROLL = 4  # vectors in flight per thread


@functools.cache
def tile_of(n: int, size: int, threads: int) -> dict[str, int]:
    """The tile for rows of n elements of `size` bytes.

    It has one warp, or as many threads as cover the row, up to `threads`.
    """
    vector = 16 // size
    cover = triton.next_power_of_2(-(-n // (vector * UNROLL)))
    lanes = min(max(cover, 32), threads)
    return {"UNROLL": UNROLL, "LANES": lanes, "VECTOR": vector, "num_warps": lanes // 32}


@triton.jit
def columns(UNROLL: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """The columns of the first tile."""
    step = tl.arange(0, UNROLL)[:, None, None] * LANES
    lane = tl.arange(0, LANES)[None, :, None]
    return (step + lane) * VECTOR + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def split(at, n, tile, RAGGED: tl.constexpr):
    """Splits a row at offset `at` in three: up to the first whole vector, vectors, the rest.

    Returns the offset at which the vectors begin, and the numbers of columns before and in them.
    Rows that are not RAGGED consist of vectors only. Columns are counted from the first vector:
    earlier ones are negative.
    """
    VECTOR: tl.constexpr = tile.shape[2]
    if RAGGED:
        begin = (at + VECTOR - 1) // VECTOR * VECTOR
        head = (begin - at).to(tl.int32)  # more than n if the row ends before
        return begin, head, tl.maximum(n - head, 0) // VECTOR * VECTOR
    else:
        return at, 0, n


@triton.jit
def edges(head, body, n, tile):
    """The columns of the first and last part, [2 * VECTOR], and a mask of existing columns."""
    VECTOR: tl.constexpr = tile.shape[2]
    e = tl.arange(0, 2 * VECTOR)
    col = tl.where(e < VECTOR, e - head, body + e - VECTOR)
    return col, tl.where(e < VECTOR, e < tl.minimum(head, n), col < n - head)


@triton.jit
def z_of(x, curve, MAP: tl.constexpr):
    """z of a logit. curve: (scale / softcap, softcap), or (scale, 0)."""
    inner, softcap = curve
    if MAP == "capped":
        x = tanh(x * inner) * softcap
    if MAP == "scaled":
        x *= inner
    return x


@triton.jit
def load_row(x, col, live, POLICY: tl.constexpr):
    """Columns of x in its dtype; 0 where not live.

    Loops without options load a tile before they use the last one (AHEAD), so that the load is in
    flight during that one's arithmetic. With options, the arithmetic needs all registers.
    """
    return tl.load(x + col, live, 0, eviction_policy=POLICY)


@triton.jit
def logits_of(v, bias, col, live):
    """The logits in float32, with their bias. v: as load_row returns it."""
    v = v.to(tl.float32)
    if bias is not None:
        v += tl.load(bias + col, live, 0).to(tl.float32)
    return v


@triton.jit
def z_where(v, bias, col, live, curve, MAP: tl.constexpr):
    """z in float32; -inf where not live, which is never the largest and whose exponential is 0."""
    z = logits_of(v, bias, col, live)
    if MAP != "none":
        z = z_of(z, curve, MAP)
    return tl.where(live, z, float("-inf"))


@triton.jit
def load_z(x, bias, col, live, curve, MAP: tl.constexpr, POLICY: tl.constexpr):
    return z_where(load_row(x, col, live, POLICY), bias, col, live, curve, MAP)
