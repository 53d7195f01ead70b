"""Triton cross entropy: sums over a row of logits, for its log-sum-exp and loss.

z is a logit after scale and softcap. Each thread keeps the largest z of its own columns and the sum
of exp(z - largest), so threads synchronize once per row, not once per tile.
"""

import triton
import triton.language as tl

from fusedops.triton.cross_entropy.tile import edges, load_row, load_z, split, z_where
from fusedops.triton.tile import LOG2E, LOWEST


@triton.jit
def origin_of(x, bias, n, tile, curve, MAP: tl.constexpr):
    """A typical z, float32, to subtract: plain sums of w_c z_c would lose their differences."""
    col = tl.arange(0, tile.shape[1])
    max_z = tl.max(load_z(x, bias, col, col < n, curve, MAP, "evict_last"), 0)
    return tl.where(max_z > LOWEST / 2, max_z, 0)


@triton.jit
def sums_of(
    x,
    at,
    weight,
    bias,
    n,
    tile,
    origin,
    curve,
    SMOOTH: tl.constexpr,
    MAP: tl.constexpr,
    RAGGED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Sums of a row starting at offset `at`: the largest z and the sum of exp(z - largest).

    If SMOOTH, also the sum of w_c (z_c - origin), float64.
    """
    begin, head, body = split(at, n, tile, RAGGED)
    x += begin
    if weight is not None:
        weight += head
    if bias is not None:
        bias += head
    base = tl.full([tile.shape[1]], LOWEST, tl.float32)
    exponentials = tl.full([tile.shape[1]], 0, tl.float32)
    weighted = tl.full([tile.shape[1]], 0, tl.float32)
    AHEAD: tl.constexpr = bias is None and not SMOOTH and MAP != "capped"  # see tile.load_row
    if AHEAD:
        v = load_row(x, tile, tile < body, POLICY)
    for start in range(0, body, tile.numel):
        col = start + tile
        live, after = col < body, col + tile.numel
        if AHEAD:
            ahead = load_row(x, after, after < body, POLICY)
        else:
            v = load_row(x, col, live, POLICY)
        z = z_where(v, bias, col, live, curve, MAP)
        if AHEAD:
            v = ahead
        under = tl.maximum(base, tl.max(tl.max(z, 2), 0))
        exponentials *= tl.exp2((base - under) * LOG2E)
        exponentials += tl.sum(tl.sum(tl.exp2((z - under[None, :, None]) * LOG2E), 2), 0)
        base = under
        if SMOOTH:
            weighted += tl.sum(tl.sum(_weighted(z, weight, col, live, origin), 2), 0)
    max_z = tl.max(base, 0)
    if RAGGED:
        col, live = edges(head, body, n, tile)
        z = load_z(x, bias, col, live, curve, MAP, POLICY)
        max_z = tl.maximum(max_z, tl.max(z, 0))
    sum_of = tl.sum(exponentials * tl.exp2((base - max_z) * LOG2E), 0)
    weighted_sum = tl.sum(weighted, 0)
    if RAGGED:
        sum_of += tl.sum(tl.exp2((z - max_z) * LOG2E), 0)
        if SMOOTH:
            weighted_sum += tl.sum(_weighted(z, weight, col, live, origin), 0)
    return max_z.to(tl.float64), sum_of.to(tl.float64), weighted_sum.to(tl.float64)


@triton.jit
def _weighted(z, weight, col, live, origin):
    """w_c (z_c - origin)"""
    s = z - origin
    if weight is not None:
        s *= tl.load(weight + col, live, 0)
    return tl.where(live, s, 0)


@triton.jit
def carry(state, rows, first, base, exponentials, weighted, origin, z_t, here):
    """Merges these classes' sums into `state`. here: whether z_t is among them."""
    before = first > 0
    old = tl.load(state, before, LOWEST)
    max_z = tl.maximum(base, old)
    exponentials *= tl.exp(base - max_z)
    exponentials += tl.load(state + rows, before, 0) * tl.exp(old - max_z)
    weighted += tl.load(state + 2 * rows, before, 0)
    z_t = tl.where(here, z_t, tl.load(state + 4 * rows, before, 0))
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(state, max_z)
    tl.store(state + rows, exponentials)
    tl.store(state + 2 * rows, weighted)
    tl.store(state + 3 * rows, origin.to(tl.float64))
    tl.store(state + 4 * rows, z_t)
    return max_z, exponentials, weighted, z_t
