"""Triton cross entropy: computes the gradient of a row's logits.

The target's gradient is computed in float64, because p_t may be near 1. All other columns need only
the row's lse and factors.
"""

import triton
import triton.language as tl

from fusedops.triton.cross_entropy.tile import edges, load_row, logits_of, split
from fusedops.triton.tile import LOG2E, tanh


@triton.jit
def write_gradient(
    x,
    at,
    weight,
    bias,
    dx,
    to,
    n,
    tile,
    goal,
    lse,
    every,
    g,
    scalars,
    curve,
    SMOOTH: tl.constexpr,
    MAP: tl.constexpr,
    RAGGED: tl.constexpr,
    BACK: tl.constexpr,
):
    """Writes a row's logit gradients, from offset `at` of x to offset `to` of dx.

    Both may be the same memory. BACK: from the last tile to the first. goal: (t, w_t, x_t, z_t). g:
    the gradient of the row's loss times the scale, float64.
    """
    begin, head, body = split(to, n, tile, RAGGED)
    x += begin + (at - to)
    dx += begin
    if weight is not None:
        weight += head
    if bias is not None:
        bias += head
    first = tl.maximum(body - 1, 0) // tile.numel * tile.numel if BACK else 0
    AHEAD: tl.constexpr = bias is None and not SMOOTH and MAP != "capped"  # see tile.load_row
    if AHEAD:
        v = load_row(x, first + tile, first + tile < body, "evict_first")
    t, w, x_t, z_t = goal
    softmax, smooth, goal_dx = _factors(w, x_t, z_t, lse, every, g, scalars, curve, MAP)
    factors = (softmax.to(tl.float32), smooth.to(tl.float32))
    of_target = ((t - head).to(tl.int32), goal_dx.to(tl.float32))
    POLICY: tl.constexpr = "evict_first" if BACK else ""  # keep logits that are read again
    tl.debug_barrier()  # all threads have read x_t before one overwrites it
    for start in range(0, body, tile.numel):
        col = (first - start if BACK else start) + tile
        live, after = col < body, col + (-tile.numel if BACK else tile.numel)
        if AHEAD:
            ahead = load_row(x, after, (after >= 0) & (after < body), "evict_first")
        else:
            v = load_row(x, col, live, "evict_first")
        d = _gradient(v, weight, bias, col, live, lse, factors, of_target, curve, SMOOTH, MAP)
        if AHEAD:
            v = ahead
        tl.store(dx + col, d.to(dx.dtype.element_ty), live, eviction_policy=POLICY)
    if RAGGED:
        col, live = edges(head, body, n, tile)
        v = load_row(x, col, live, "evict_first")
        d = _gradient(v, weight, bias, col, live, lse, factors, of_target, curve, SMOOTH, MAP)
        tl.store(dx + col, d.to(dx.dtype.element_ty), live)


@triton.jit
def _factors(w, x_t, z_t, lse, every, g, scalars, curve, MAP: tl.constexpr):
    """A row's g P, g S, and the gradient of its target's logit."""
    sharp, share, z_loss = scalars
    inner, _ = curve
    square = 2 * z_loss * w * lse
    softmax = g * (sharp * w + share * every + square)
    p = tl.exp(z_t - lse)
    d = g * (sharp * w * (p - 1) + share * (every * p - w) + square * p)
    if MAP == "capped":
        bent = 1 - 2 / (1 + tl.exp(2 * inner * x_t.to(tl.float64)))
        d *= 1 - bent * bent
    return softmax, g * share, d


@triton.jit
def _gradient(
    v,
    weight,
    bias,
    col,
    live,
    lse,
    factors,
    of_target,
    curve,
    SMOOTH: tl.constexpr,
    MAP: tl.constexpr,
):
    """Some columns of dx, float32. v: as load_row returns them."""
    z = logits_of(v, bias, col, live)
    softmax, smooth = factors
    t, of_t = of_target
    inner, softcap = curve
    if MAP == "capped":
        bent = tanh(z * inner)
        z = bent * softcap
    if MAP == "scaled":
        z *= inner
    high = lse.to(tl.float32)
    under_lse = z - high - (lse - high).to(tl.float32)
    d = softmax * tl.exp2(under_lse * LOG2E)
    if SMOOTH:
        d -= smooth if weight is None else smooth * tl.load(weight + col, live, 0)
    if MAP == "capped":
        d *= 1 - bent * bent
    return tl.where(col == t, of_t, d)


@triton.jit
def write_zeros(dx, to, n, tile, RAGGED: tl.constexpr):
    begin, head, body = split(to, n, tile, RAGGED)
    dx += begin
    for start in range(0, body, tile.numel):
        col = start + tile
        tl.store(dx + col, tl.zeros(tile.shape, dx.dtype.element_ty), col < body)
    if RAGGED:
        col, live = edges(head, body, n, tile)
        tl.store(dx + col, tl.zeros(col.shape, dx.dtype.element_ty), live)
