"""Triton attention's forward kernel and its launchers, with and without a KV cache.

A program owns a block of M queries. Tiles at the edges of the visible keys come first, with masks.
Tiles that all queries see need no mask. Both loops load ahead, and share their buffers.
A head's blocks run from last to first: with `causal`, those with most keys start first, and so do
those of the heads whose k and v fit in the L2 cache together. With few queries, a block's rows are
those of all heads that share k and v, and the keys are split among programs (decode.py). Global
traffic: q and out once, k and v once per block, mostly from the L2 cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.attention.call import (
    NOT_SPECIALIZED,
    AttentionLaunch,
    cache_arguments,
    forward_tile,
    has_kernel,
    heads_together,
)
from fusedops.triton.attention.decode import empty_parts, join, packed_rows, parts_of
from fusedops.triton.attention.scores import (
    block_of,
    curved,
    denominator,
    edge,
    exponentials,
    kept,
    key_tiles,
    load_at,
    load_rows,
    masked,
    move,
    paged_rows_at,
    pages_of,
    product,
    row_products,
    rows_at,
)
from fusedops.triton.tile import LOWEST, composite, launched, outputs_of


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    max_q: int,
    max_k: int,
    scalars: Sequence[float],
    window: Sequence[int],
    bottom_right: bool,
) -> tuple[Tensor, Tensor]:
    """fusedops::attention_forward; see csrc/ops/attention/operators.h. Returns (out, lse)."""
    operator = torch.ops.fusedops.attention_forward.default
    tensors = q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed
    arguments = *tensors, max_q, max_k, scalars, window, bottom_right
    if not has_kernel(q, v):
        return composite(operator, *arguments)
    out, lse = outputs_of(operator, *arguments)
    if lse.numel():
        with torch.accelerator.device_index(q.device.index):
            run(AttentionLaunch.of(*tensors, scalars, window, bottom_right), out, lse)
    return out, lse


def cached_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    scalars: Sequence[float],
    window: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """fusedops::cached_attention_forward; see csrc/ops/attention/cached.h. Returns (out, lse)."""
    operator = torch.ops.fusedops.cached_attention_forward.default
    arguments = q, k, v, seqused_k, block_table, sinks, cu_seqlens_q, scalars, window
    if not has_kernel(q, v) or not k.shape[0]:  # without pages there is no key
        return composite(operator, *arguments)
    out, lse = outputs_of(operator, *arguments)
    if lse.numel():
        with torch.accelerator.device_index(q.device.index):
            run(AttentionLaunch.for_cache(*arguments), out, lse)
    return out, lse


def run(call: AttentionLaunch, out: Tensor, lse: Tensor) -> None:
    if call.cu_seqlens_q is not None:  # tokens outside all sequences
        out.zero_()
        lse.fill_(-torch.inf)
    batch, heads, queries, _ = call.q.shape
    rows = packed_rows(call)
    parts = parts_of(call, rows)
    tile = forward_tile(call, rows)
    blocks = call.blocks(rows or queries, tile["M"])
    sums, softmax = (out, lse) if parts == 1 else empty_parts(call, parts)
    forward_kernel[(blocks * batch * (call.k.shape[1] if rows else heads), parts)](
        out=sums,
        lse=softmax,
        blocks=blocks,
        together=1 if rows else heads_together(call),
        PACKED=rows > 0,
        SPLIT=parts > 1,
        **call.arguments(),
        **cache_arguments(call),
        **tile,
    )
    if parts > 1:
        join(call, sums, softmax, out, lse)


@launched
@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q,
    k,
    v,
    bias,
    sinks,
    cu_q,
    cu_k,
    seed,
    out,
    lse,
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
    sequences,
    heads,
    group,
    queries,
    keys,
    blocks,
    together,
    inner,
    softcap,
    threshold: tl.uint32,
    kept_scale,
    left,
    right,
    used,
    table,
    table_row,
    pages,
    PAGE: tl.constexpr,
    MAP: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """A row of the block is query i of head h.

    together: the number of heads whose blocks with most keys run first. PACKED: a block's rows are
    the queries of all heads in one group. SPLIT: processes the tiles of part program_id(1), and
    stores sums and softmax terms for the join.
    """
    rows = queries * group if PACKED else queries
    x, of = block_and_head(blocks, together)
    first, q_begin, n_q, k_begin, n_k = block_of(
        x, cu_q, cu_k, sequences, rows, keys, M, SEQUENCES, False
    )
    if first >= n_q:
        return
    r = first + tl.arange(0, M)[:, None]
    live = r < n_q
    i = tl.where(live, r, first)  # never reads outside a tensor
    if PACKED:
        batch, of_k = of // (heads // group), of % (heads // group)
        h, i = (of_k * group + i // queries).to(tl.int64), i % queries
        first, last = 0, queries - 1
    else:
        batch, h = of // heads, (of % heads).to(tl.int64)
        of_k = of % heads // group
        last = tl.minimum(first + M, n_q) - 1
    batch, of_k = batch.to(tl.int64), of_k.to(tl.int64)
    of_cache = batch
    if used is not None:
        if cu_q is not None:
            of_cache, k_begin = k_begin.to(tl.int64), k_begin * 0
        n_k = tl.minimum(tl.maximum(tl.load(used + of_cache), 0), keys).to(tl.int32)
    from_q, from_k = q_begin.to(tl.int64), k_begin.to(tl.int64)
    row = (batch * heads + h) * queries + from_q + i  # of lse
    d = tl.arange(0, D)[None, :]
    at = q + batch * q_batch + h * q_head + (from_q + i) * q_row
    block = tl.load(at + d, live & (d < WIDTH), 0)
    k += of_k * k_head + from_k * k_row
    v += of_k * v_head + from_k * v_row
    if table is None:
        k += of_cache * k_batch
        v += of_cache * v_batch
    else:
        table += of_cache * table_row
    if bias is not None:
        bias += batch * bias_batch + h * bias_head + i.to(tl.int64) * bias_row

    lead = k_begin % 4  # aligns the dropout's groups of keys with tiles
    offset = n_k - (queries if PACKED else n_q) if BOTTOM_RIGHT else 0
    window = left, right, offset
    curve = inner, softcap, None
    if q.dtype.element_ty == tl.float32:
        curve = inner, softcap, 1  # type: ignore[assignment]
    operands = at, live, k, k_row, v, v_row, bias, bias_key
    cache = table, pages, k_batch, v_batch
    place = row, i, k_begin, n_k
    options = window, curve, (seed, threshold, kept_scale)
    begin, end, whole_begin, whole_end = key_tiles(first, last, window, n_k, lead, N)
    if SPLIT:
        begin, end, whole_begin, whole_end = part_of(begin, end, whole_begin, whole_end)
    sums = tl.zeros([M, DV], tl.float32)
    max_score = tl.full([M, 1], LOWEST, tl.float32)
    total = tl.zeros([M, 1], tl.float32)
    for n in range(0, end - begin - (whole_end - whole_begin)):
        start = edge(n, begin, whole_begin, whole_end) * N - lead
        sums, max_score, total = add_tile(
            sums, max_score, total, block, operands, cache, place, start, options,
            MAP, PAGE, WIDTH, V_WIDTH, N, True,
        )  # fmt: skip
    for t in range(whole_begin, whole_end):
        sums, max_score, total = add_tile(
            sums, max_score, total, block, operands, cache, place, t * N - lead, options,
            MAP, PAGE, WIDTH, V_WIDTH, N, False,
        )  # fmt: skip

    d = tl.arange(0, DV)[None, :]
    if SPLIT:
        row += tl.program_id(1) * (tl.num_programs(0).to(tl.int64) // blocks) * rows
        tl.store(out + row * V_WIDTH + d, sums, live & (d < V_WIDTH))
        tl.store(lse + 2 * row, max_score, live)
        tl.store(lse + 2 * row + 1, total, live)
    else:
        sink = None if sinks is None else tl.load(sinks + h)
        share, row_lse = denominator(max_score, total, sink, MAP)
        tl.store(lse + row, row_lse, live)
        to = out + ((batch * queries + from_q + i) * heads + h) * V_WIDTH
        tl.store(to + d, (sums * share).to(out.dtype.element_ty), live & (d < V_WIDTH))


@triton.jit
def block_and_head(blocks, together):
    """This program's block, from last to first, and its head; see `heads_together`."""
    program, heads = tl.program_id(0), tl.num_programs(0) // blocks
    first = program // (blocks * together) * together
    rest, each = program - first * blocks, tl.minimum(together, heads - first)
    return blocks - 1 - rest // each, first + rest % each


@triton.jit
def part_of(begin, end, whole_begin, whole_end):
    """The range of tiles that belongs to one part."""
    parts = tl.num_programs(1)
    each = (end - begin + parts - 1) // parts
    begin = tl.minimum(begin + tl.program_id(1) * each, end)
    end = tl.minimum(begin + each, end)
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), end)
    return begin, end, whole_begin, tl.minimum(tl.maximum(whole_end, whole_begin), end)


@triton.jit
def add_tile(
    sums,
    max_score,
    total,
    block,
    operands,
    cache,
    place,
    start,
    options,
    MAP: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Continues the softmax over keys [start, start + N) of a sequence."""
    at, live, k, k_row, v, v_row, bias, bias_key = operands
    row, i, k_begin, n_k = place
    window, curve, drop = options
    j = start + tl.arange(0, N)[None, :]
    table, pages, k_batch, v_batch = cache
    if table is None:
        keys = load_rows(k, k_row, start, n_k, N, WIDTH, block.shape[1], EDGE)
        keys_at = rows_at(k, k_row, start, n_k, N)
    else:
        page = pages_of(table, pages, start, n_k, N, PAGE)
        keys_at = paged_rows_at(k, k_batch, k_row, page, start, n_k, N, PAGE)
        keys = load_at(keys_at, WIDTH, block.shape[1], EDGE)
    x = row_products(block, (at, live), keys, keys_at, WIDTH)
    x = masked(curved(x, curve, MAP), bias, bias_key, i, j, window, n_k, EDGE)
    max_score, factor = move(max_score, x, curve, MAP)
    p = exponentials(x, max_score, curve, MAP)
    total = total * factor + tl.sum(p, 1, keep_dims=True)
    if drop[0] is not None:
        p *= kept(drop, row, k_begin + start, block.shape[0], N)
    if table is None:
        values = load_rows(v, v_row, start, n_k, N, V_WIDTH, sums.shape[1], EDGE)
    else:
        values_at = paged_rows_at(v, v_batch, v_row, page, start, n_k, N, PAGE)
        values = load_at(values_at, V_WIDTH, sums.shape[1], EDGE)
    return sums * factor + product(p.to(v.dtype.element_ty), values), max_score, total
