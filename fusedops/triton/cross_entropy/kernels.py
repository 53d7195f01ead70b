"""Triton cross-entropy kernels: each row's loss and gradient, and the reduction over rows.

Forward and backward have one program per row of logits. Global traffic is the minimum: the forward
reads the logits once; the backward reads them and writes the gradient once. A forward that computes
the gradient walks over the row, then back, starting with the columns that are most recent in the L2
cache.

Per-row values (lse, loss, the gradient of the target's logit) are float64: lse and the target's
logit may agree to their last float32 digit. Formulas: csrc/kernels/cross_entropy.h.
"""

import triton
import triton.language as tl

from fusedops.triton.cross_entropy.gradient import write_gradient, write_zeros
from fusedops.triton.cross_entropy.sums import carry, origin_of, sums_of
from fusedops.triton.cross_entropy.tile import columns, load_row, logits_of, z_of
from fusedops.triton.tile import launched


@launched
@triton.jit(do_not_specialize=["rows", "classes", "ignore_index"])
def forward_kernel(
    x,
    target,
    weight,
    bias,
    whole,
    total,
    state,
    losses,
    lse,
    dx,
    stride,
    dstride,
    n,
    first,
    rows,
    classes,
    ignore_index,
    sharp,
    share,
    z_loss,
    inner,
    softcap,
    rate,
    MEAN: tl.constexpr,
    SMOOTH: tl.constexpr,
    MAP: tl.constexpr,
    RAGGED: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Sums row program_id(0) over classes [first, first + n); stores its loss and lse so far.

    With dx, the row is whole, and its gradient for a loss gradient of 1 is written too. state:
    [5, rows] float64, the sums over earlier classes; None if the row is whole.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * stride
    to = at if dstride is None else row * dstride
    tile = columns(UNROLL, LANES, VECTOR)
    t = tl.load(target + row)
    if t == ignore_index:
        tl.store(lse + row, 0.0)
        tl.store(losses + row, 0.0)
        if dx is not None:
            write_zeros(dx, to, n, tile, RAGGED)
    else:
        scalars, curve = (sharp, share, z_loss), (inner, softcap)
        w, every = _weights(weight, whole, t, classes)
        t -= first
        if weight is not None:
            weight += first
        if bias is not None:
            bias += first
        x_t = _target_logit(x + at, bias, t, n)
        z_t = z_of(x_t, curve, MAP).to(tl.float64)
        origin = origin_of(x + at, bias, n, tile, curve, MAP) if SMOOTH else 0.0
        POLICY: tl.constexpr = "evict_first" if dx is None else "evict_last"
        if state is not None:
            state += row
            origin = tl.where(first > 0, tl.load(state + 3 * rows).to(tl.float32), origin)
        base, exponentials, weighted = sums_of(
            x, at, weight, bias, n, tile, origin, curve, SMOOTH, MAP, RAGGED, POLICY
        )
        if state is not None:
            base, exponentials, weighted, z_t = carry(
                state, rows, first, base, exponentials, weighted, origin, z_t, (t >= 0) & (t < n)
            )
        log_sum = tl.log(tl.where(exponentials == 0, float("nan"), exponentials))
        row_lse = base + log_sum
        loss = w * sharp * (base - z_t + log_sum) + w * z_loss * row_lse * row_lse
        if SMOOTH:
            loss += share * (every * (base - origin + log_sum) - weighted)
        tl.store(lse + row, row_lse)
        tl.store(losses + row, loss.to(losses.dtype.element_ty))
        if dx is not None:
            g = _per_row(1.0, total, MEAN) * rate
            goal = (t, w, x_t, z_t)
            write_gradient(
                x, at, weight, bias, dx, to, n, tile, goal, row_lse, every, g, scalars, curve,
                SMOOTH, MAP, RAGGED, True,
            )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["classes", "ignore_index"])
def backward_kernel(
    grad,
    x,
    target,
    weight,
    bias,
    whole,
    lse,
    total,
    dx,
    stride,
    dstride,
    n,
    first,
    classes,
    ignore_index,
    sharp,
    share,
    z_loss,
    inner,
    softcap,
    rate,
    PER_ROW: tl.constexpr,
    MEAN: tl.constexpr,
    SMOOTH: tl.constexpr,
    MAP: tl.constexpr,
    RAGGED: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Writes the gradient of row program_id(0)'s logits for classes [first, first + n)."""
    row = tl.program_id(0).to(tl.int64)
    at = row * stride
    to = at if dstride is None else row * dstride
    tile = columns(UNROLL, LANES, VECTOR)
    t = tl.load(target + row)
    if t == ignore_index:
        write_zeros(dx, to, n, tile, RAGGED)
    else:
        scalars, curve = (sharp, share, z_loss), (inner, softcap)
        w, every = _weights(weight, whole, t, classes)
        t -= first
        if weight is not None:
            weight += first
        if bias is not None:
            bias += first
        x_t = _target_logit(x + at, bias, t, n)
        goal = (t, w, x_t, z_of(x_t, curve, MAP).to(tl.float64))
        g = _per_row(tl.load(grad + (row if PER_ROW else 0)).to(tl.float64), total, MEAN) * rate
        write_gradient(
            x, at, weight, bias, dx, to, n, tile, goal, tl.load(lse + row), every, g,
            scalars, curve, SMOOTH, MAP, RAGGED, False,
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["rows", "classes", "ignore_index"])
def reduce_kernel(
    target,
    weight,
    losses,
    total,
    loss,
    rows,
    classes,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores total, the sum of all rows' w_t, and the loss if there are row losses; one program."""
    weights = tl.zeros([BLOCK], tl.float64)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = row < rows
        t = tl.load(target + row, live, ignore_index)
        counts = (t != ignore_index) & (t >= 0) & (t < classes)
        if weight is None:
            weights += counts.to(tl.float64)
        else:
            weights += tl.load(weight + t, counts, 0)
        if losses is not None:
            sums += tl.load(losses + row, live, 0)
    of_all = tl.sum(weights, 0)
    tl.store(total, of_all)
    if losses is not None:
        value = tl.sum(sums, 0)
        if MEAN:
            value = tl.where(of_all == 0, float("nan"), value / tl.where(of_all == 0, 1, of_all))
        tl.store(loss, value.to(loss.dtype.element_ty))


@triton.jit
def _weights(weight, whole, t, classes):
    """w_t and the sum of the w_c, float64. If t is not a class, w_t and all results are NaN."""
    valid = (t >= 0) & (t < classes)
    w = tl.where(valid, 1.0, float("nan")).to(tl.float64)
    if weight is not None:
        w *= tl.load(weight + t, valid, 0)
    if whole is not None:
        return w, tl.load(whole)
    else:
        return w, classes.to(tl.float64)


@triton.jit
def _target_logit(x, bias, t, n):
    """float32; 0 if the target is not among columns [0, n)."""
    live = (t >= 0) & (t < n)
    return logits_of(load_row(x, t, live, ""), bias, t, live)


@triton.jit
def _per_row(g, total, MEAN: tl.constexpr):
    """A row's loss gradient, from the loss's. NaN for a mean of rows with weight 0."""
    if MEAN:
        of_all = tl.load(total)
        g = tl.where(of_all == 0, float("nan"), g / of_all)
    return g
