"""Triton attention's second backward kernel: gradients of keys and values.

A program owns a block of N keys of one head. It loops over the tiles of M queries that see them,
for all heads that share it, one after another: sums have a fixed order, and there are no atomics.
Tiles of scores are [N, M], keys by queries. Both sums then have a tile as their first operand as it
is, which sm_90's products read from registers; the other layout needs a transposed copy. A score
adds up the same products in the same order as in the first kernel: a large score that was rounded
differently would give a probability that does not match its row's sum.

Traffic per tile: M rows of q and of out's gradient from the L2 cache, for four products of M N D.
So FLOP per byte grow with N alone: 2 N, 256 for 128 keys of one width.
"""

import triton
import triton.language as tl

from fusedops.triton.attention.call import NOT_SPECIALIZED
from fusedops.triton.attention.scores import (
    block_of,
    curved,
    edge,
    exponentials,
    kept,
    load_rows,
    masked,
    product,
    query_tiles,
    row_products,
    rows_at,
    score_gradients,
    slope,
)
from fusedops.triton.tile import launched


@launched
@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_kernel(
    q,
    k,
    v,
    bias,
    cu_q,
    cu_k,
    seed,
    grad,
    grad_lse,
    stats,
    dk,
    dv,
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
    SEQUENCES: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    x, of = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    first, k_begin, n_k, q_begin, n_q = block_of(
        x, cu_k, cu_q, sequences, keys, queries, N, SEQUENCES, True
    )
    if first >= n_k:
        return
    kv_heads = heads // group
    batch, of_k = (of // kv_heads).to(tl.int64), of % kv_heads
    from_q, from_k = q_begin.to(tl.int64), k_begin.to(tl.int64)
    k += batch * k_batch + of_k.to(tl.int64) * k_head + from_k * k_row
    v += batch * v_batch + of_k.to(tl.int64) * v_head + from_k * v_row
    block = load_rows(k, k_row, first, n_k, N, WIDTH, D, True)
    values = load_rows(v, v_row, first, n_k, N, V_WIDTH, DV, True)
    r = first + tl.arange(0, N)[:, None]
    offset = n_k - n_q if BOTTOM_RIGHT else 0
    window = left, right, offset
    curve = inner, softcap, None
    if q.dtype.element_ty == tl.float32:
        curve = inner, softcap, 1  # type: ignore[assignment]
    options = window, curve, (seed, threshold, kept_scale)
    begin, end, whole_begin, whole_end = query_tiles(
        first, tl.minimum(first + N, n_k) - 1, window, n_q, M
    )
    if first + N > n_k:  # the bias of missing keys must not be read
        whole_begin, whole_end = end, end
    rows = (tl.num_programs(0) // blocks).to(tl.int64) * group * queries
    keys_sum = tl.zeros([N, D], tl.float32)
    values_sum = tl.zeros([N, DV], tl.float32)
    for g in range(0, group):
        h = (of_k * group + g).to(tl.int64)
        row = (batch * heads + h) * queries + from_q
        at_q = q + batch * q_batch + h * q_head + from_q * q_row
        at_grad = grad + batch * grad_batch + h * grad_head + from_q * grad_row
        of_bias = bias, batch * bias_batch + h * bias_head, bias_row, bias_key
        operands = k, k_row, v, v_row, at_q, q_row, at_grad, grad_row
        place = row, first, k_begin, n_q, n_k
        for n in range(0, end - begin - (whole_end - whole_begin)):
            start = edge(n, begin, whole_begin, whole_end) * M
            keys_sum, values_sum = add_gradients(
                keys_sum, values_sum, block, values, stats, grad_lse, rows, dk, dv, operands,
                of_bias, place, start, options, MAP, WIDTH, V_WIDTH, M, True,
            )  # fmt: skip
        for t in range(whole_begin, whole_end):
            keys_sum, values_sum = add_gradients(
                keys_sum, values_sum, block, values, stats, grad_lse, rows, dk, dv, operands,
                of_bias, place, t * M, options, MAP, WIDTH, V_WIDTH, M, False,
            )  # fmt: skip

    live = (r >= 0) & (r < n_k)
    to = (batch * keys + from_k + r) * kv_heads + of_k
    if dk is not None:
        d = tl.arange(0, D)[None, :]
        gradient = (keys_sum * scale).to(dk.dtype.element_ty)
        tl.store(dk + to * WIDTH + d, gradient, live & (d < WIDTH))
    if dv is not None:
        d = tl.arange(0, DV)[None, :]
        gradient = values_sum.to(dv.dtype.element_ty)
        tl.store(dv + to * V_WIDTH + d, gradient, live & (d < V_WIDTH))


@triton.jit
def add_gradients(
    keys_sum,
    values_sum,
    keys,
    values,
    stats,
    grad_lse,
    rows,
    dk,
    dv,
    operands,
    of_bias,
    place,
    start,
    options,
    MAP: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    M: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Adds da q and p d do over queries [start, start + M). Zero past the last query.

    Rows' numbers are loaded where they are used: both sums leave few registers.
    """
    k, k_row, v, v_row, q, q_row, grad, grad_row = operands
    bias, to_head, bias_row, bias_key = of_bias
    row, first, k_begin, n_q, n_k = place
    window, curve, drop = options
    N: tl.constexpr = keys.shape[0]
    i = start + tl.arange(0, M)[None, :]
    j = first + tl.arange(0, N)[:, None]
    queries = load_rows(q, q_row, start, n_q, M, WIDTH, keys.shape[1], EDGE)
    do = load_rows(grad, grad_row, start, n_q, M, V_WIDTH, values.shape[1], EDGE)
    stats += row + start
    base = load_stats(stats, start, n_q, float("inf"), M, EDGE)  # whatever the last row's bias
    share = load_stats(stats + rows, start, n_q, 0, M, EDGE)
    if bias is not None:
        bias += to_head + tl.minimum(i, n_q - 1).to(tl.int64) * bias_row
    x = row_products(
        keys,
        rows_at(k, k_row, first, n_k, N),
        queries,
        rows_at(q, q_row, start, n_q, M),
        WIDTH,
    )
    plain = curved(x, curve, MAP)
    s = masked(plain, bias, bias_key, i, j, window, n_k, EDGE)
    p = exponentials(s, base, curve, MAP) * share
    dropped = p
    if drop[0] is not None:
        numbers = row + start + tl.arange(0, M)[:, None]
        factor = tl.trans(kept(drop, numbers, k_begin + first, M, N))
        dropped = p * factor
    if dv is not None:
        values_sum += product(dropped.to(do.dtype), do)
    if dk is not None:
        dp = row_products(
            values,
            rows_at(v, v_row, first, n_k, N),
            do,
            rows_at(grad, grad_row, start, n_q, M),
            V_WIDTH,
        )
        if drop[0] is not None:
            dp *= factor
        delta = load_stats(stats + 2 * rows, start, n_q, 0, M, EDGE)
        of_lse = None
        if grad_lse is not None:
            of_lse = load_stats(grad_lse + row + start, start, n_q, 0, M, EDGE).to(tl.float32)
        d = score_gradients(p, dp, delta, of_lse)
        if MAP == "capped":
            d *= slope(plain, curve)
        keys_sum += product(d.to(queries.dtype), queries)
    return keys_sum, values_sum


@triton.jit
def load_stats(t, start, n_q, other, M: tl.constexpr, EDGE: tl.constexpr):
    """t of queries [start, start + M), [1, M]. t points to the first; `other` past the last."""
    i = tl.arange(0, M)[None, :]
    if EDGE:
        return tl.load(t + i, start + i < n_q, other)
    else:
        return tl.load(t + i)
