"""Triton attention's first backward kernel: row statistics, and gradients of queries and scores.

A program owns a block of M queries of one head and loops over the tiles of N keys that they see, as
in the forward. It stores base, share and delta of each row for the keys' gradients: a probability
is exp(s - base) share. These values come from lse and out, or, if EXACT, from an extra first walk.
Unless EXACT, delta also contains lse's gradient, with the other sign.
EXACT is needed with a numeric bias: if all keys of a row have the smallest float32 as bias, lse
cannot hold the logarithm of their number. It is also needed in float32: dp - delta must be exactly
0 where one key has all of the probability, but out is rounded. (In 16 bits, eager's dp is rounded
too.)
"""

import triton
import triton.language as tl

from fusedops.triton.attention.call import NOT_SPECIALIZED
from fusedops.triton.attention.scores import (
    block_of,
    curved,
    denominator,
    edge,
    exponentials,
    kept,
    key_tiles,
    load_rows,
    masked,
    move,
    product,
    row_products,
    rows_at,
    score_gradients,
    slope,
)
from fusedops.triton.tile import LOG2E, LOWEST, launched


@launched
@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def query_kernel(
    q,
    k,
    v,
    bias,
    sinks,
    cu_q,
    cu_k,
    seed,
    grad,
    grad_lse,
    out,
    lse,
    stats,
    dq,
    ds,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    grad_batch,
    grad_head,
    grad_row,
    sequences,
    heads,
    group,
    queries,
    keys,
    blocks,
    scale,
    inner,
    softcap,
    threshold: tl.uint32,
    kept_scale,
    left,
    right,
    MAP: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    EXACT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """stats: base, share, delta, [3, rows] float32. ds: the scores' gradients, float32, or None."""
    x, of = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    first, q_begin, n_q, k_begin, n_k = block_of(
        x, cu_q, cu_k, sequences, queries, keys, M, SEQUENCES, False
    )
    if first >= n_q:
        return
    i = first + tl.arange(0, M)[:, None]
    live = i < n_q
    i = tl.where(live, i, first)  # never reads outside a tensor
    batch, h, of_k = (of // heads).to(tl.int64), (of % heads).to(tl.int64), of % heads // group
    from_q, from_k = q_begin.to(tl.int64), k_begin.to(tl.int64)
    row = (batch * heads + h) * queries + from_q + i
    q += batch * q_batch + h * q_head + from_q * q_row
    grad += batch * grad_batch + h * grad_head + from_q * grad_row
    k += batch * k_batch + of_k.to(tl.int64) * k_head + from_k * k_row
    v += batch * v_batch + of_k.to(tl.int64) * v_head + from_k * v_row
    if bias is not None:
        bias += batch * bias_batch + h * bias_head + i.to(tl.int64) * bias_row

    block = load_rows(q, q_row, first, n_q, M, WIDTH, D, True)
    do = load_rows(grad, grad_row, first, n_q, M, V_WIDTH, DV, True)
    lead = k_begin % 4  # aligns the dropout's groups of keys with tiles
    offset = n_k - n_q if BOTTOM_RIGHT else 0
    window = left, right, offset
    curve = inner, softcap, None
    if q.dtype.element_ty == tl.float32:
        curve = inner, softcap, 1  # type: ignore[assignment]
    place = row, i, k_begin, n_k
    at_q, exists = rows_at(q, q_row, first, n_q, M)
    at_grad, _ = rows_at(grad, grad_row, first, n_q, M)
    operands = at_q, at_grad, exists, k, k_row, v, v_row, bias, bias_key
    options = window, curve, (seed, threshold, kept_scale)
    begin, end, whole_begin, whole_end = key_tiles(
        first, tl.minimum(first + M, n_q) - 1, window, n_k, lead, N
    )
    edges = end - begin - (whole_end - whole_begin)

    if EXACT:
        base = tl.full([M, 1], LOWEST, tl.float32)
        total = tl.zeros([M, 1], tl.float32)
        weighted = tl.zeros([M, 1], tl.float32)
        for n in tl.range(0, edges, num_stages=1):
            start = edge(n, begin, whole_begin, whole_end) * N - lead
            base, total, weighted = add_products(
                base, total, weighted, block, do, operands, place, start, options,
                MAP, WIDTH, V_WIDTH, N, True,
            )  # fmt: skip
        for t in range(whole_begin, whole_end):
            base, total, weighted = add_products(
                base, total, weighted, block, do, operands, place, t * N - lead, options,
                MAP, WIDTH, V_WIDTH, N, False,
            )  # fmt: skip
        sink = None if sinks is None else tl.load(sinks + h)
        share, _ = denominator(base, total, sink, MAP)
        delta = weighted * share
    else:
        base, share = softmax_of(tl.load(lse + row), MAP)
        to = out + ((batch * queries + from_q) * heads + h) * V_WIDTH
        result = load_rows(to, heads * V_WIDTH, first, n_q, M, V_WIDTH, DV, True)
        delta = tl.sum(result.to(tl.float32) * do.to(tl.float32), 1, keep_dims=True)
        if grad_lse is not None:
            delta -= tl.load(grad_lse + row).to(tl.float32)  # out is rounded more than this
    rows = (tl.num_programs(0) // blocks).to(tl.int64) * queries
    tl.store(stats + row, base, live)
    tl.store(stats + rows + row, share, live)
    tl.store(stats + 2 * rows + row, delta, live)

    if dq is not None or ds is not None:
        of_lse, factor = None, None  # not EXACT: the share is close to 1, and multiplies the sums
        if EXACT:
            factor = share
            if grad_lse is not None:
                of_lse = tl.load(grad_lse + row).to(tl.float32)
        sums = tl.zeros([M, D], tl.float32)
        if ds is not None:
            ds += row * keys + k_begin
        for n in range(0, edges):
            start = edge(n, begin, whole_begin, whole_end) * N - lead
            sums = add_gradient(
                sums, base, factor, delta, of_lse, block, do, ds, live, operands, place, start,
                options, MAP, WIDTH, V_WIDTH, N, True,
            )  # fmt: skip
        for t in range(whole_begin, whole_end):
            sums = add_gradient(
                sums, base, factor, delta, of_lse, block, do, ds, live, operands, place,
                t * N - lead, options, MAP, WIDTH, V_WIDTH, N, False,
            )  # fmt: skip
        if dq is not None:
            d = tl.arange(0, D)[None, :]
            to = dq + ((batch * queries + from_q + i) * heads + h) * WIDTH
            if not EXACT:
                sums *= share
            tl.store(to + d, (sums * scale).to(dq.dtype.element_ty), live & (d < WIDTH))


@triton.jit
def softmax_of(lse, MAP: tl.constexpr):
    """base and share of rows from a float64 lse: a float32 part and the remainder."""
    if MAP == "folded":
        lse *= LOG2E
    dead = lse == float("-inf")
    base = tl.where(dead, float("inf"), lse).to(tl.float32)
    rest = tl.where(dead, 0, base.to(tl.float64) - lse).to(tl.float32)
    share = tl.exp2(rest) if MAP == "folded" else tl.exp2(rest * LOG2E)
    return base, tl.where(dead, 0, share)


@triton.jit
def products(
    block,
    do,
    operands,
    place,
    start,
    options,
    MAP: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """For keys [start, start + N): keys, scores before and after the bias, and dp.

    dp is the gradient of the probabilities, from out's gradient.
    """
    at_q, at_grad, exists, k, k_row, v, v_row, bias, bias_key = operands
    row, i, k_begin, n_k = place
    window, curve, drop = options
    keys = load_rows(k, k_row, start, n_k, N, WIDTH, block.shape[1], EDGE)
    values = load_rows(v, v_row, start, n_k, N, V_WIDTH, do.shape[1], EDGE)
    at_k, at_v = rows_at(k, k_row, start, n_k, N), rows_at(v, v_row, start, n_k, N)
    x = row_products(block, (at_q, exists), keys, at_k, WIDTH)
    dp = row_products(do, (at_grad, exists), values, at_v, V_WIDTH)
    j = start + tl.arange(0, N)[None, :]
    plain = curved(x, curve, MAP)
    s = masked(plain, bias, bias_key, i, j, window, n_k, EDGE)
    if drop[0] is not None:
        dp *= kept(drop, row, k_begin + start, block.shape[0], N)
    return keys, plain, s, dp


@triton.jit
def add_products(
    max_score,
    total,
    weighted,
    block,
    do,
    operands,
    place,
    start,
    options,
    MAP: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Continues the softmax and the sum of p dp over one tile.

    In float32, the rounding of each product would use up all that the yardstick allows for the
    bias's gradient.
    """
    _, _, s, dp = products(block, do, operands, place, start, options, MAP, WIDTH, V_WIDTH, N, EDGE)
    max_score, factor = move(max_score, s, options[1], MAP)
    p = exponentials(s, max_score, options[1], MAP)
    total = total * factor + tl.sum(p, 1, keep_dims=True)
    if options[1][2] is not None:  # exact
        part = tl.sum(p.to(tl.float64) * dp.to(tl.float64), 1, keep_dims=True)
    else:
        part = tl.sum(p * dp, 1, keep_dims=True)
    return max_score, total, (weighted * factor.to(part.dtype) + part).to(tl.float32)


@triton.jit
def add_gradient(
    sums,
    base,
    share,
    delta,
    of_lse,
    block,
    do,
    ds,
    live,
    operands,
    place,
    start,
    options,
    MAP: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Adds da k for one tile. Writes ds."""
    keys, plain, s, dp = products(
        block, do, operands, place, start, options, MAP, WIDTH, V_WIDTH, N, EDGE
    )
    curve = options[1]
    p = exponentials(s, base, curve, MAP)
    if share is not None:
        p *= share
    d = score_gradients(p, dp, delta, of_lse)
    if ds is not None:
        j = start + tl.arange(0, N)[None, :]
        tl.store(ds + j, d, live & (j >= 0) & (j < place[3]))
    if MAP == "capped":
        d *= slope(plain, curve)
    return sums + product(d.to(keys.dtype), keys)
