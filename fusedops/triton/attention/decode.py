"""Splits Triton attention's keys among programs for few queries, and joins the results.

A block's rows are the queries of all heads that share k and v, which are then read once. If that
gives too few programs to fill a GPU, the keys are split among several programs, and a second kernel
adds their sums and softmax terms in order. The number of parts does not depend on the values, so
results are bitwise reproducible.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.attention.call import AttentionLaunch
from fusedops.triton.attention.scores import denominator, exponential
from fusedops.triton.tile import LOWEST, launched, multiprocessors

ROWS = 64  # per block, at most
LEAST_KEYS = 32  # per part: in 16 bits one tile, so that a program waits for its loads once
MOST_PARTS = 64
LEAST_SPLIT = 320  # keys: with fewer, the second launch should take what the split saves


def packed_rows(call: AttentionLaunch) -> int:
    """Rows of a block that holds all queries of one k and v head; 0 if they do not fit."""
    rows = call.q.shape[1] // max(call.k.shape[1], 1) * call.q.shape[2]
    return rows if call.cu_seqlens_q is None and rows <= ROWS else 0


def parts_of(call: AttentionLaunch, rows: int) -> int:
    """The number of programs among which a block's keys are split."""
    of = call.batch * call.k.shape[1]
    if not rows or of == 0:
        return 1
    return split(of, call.room, multiprocessors(call.q.device))


def split(programs: int, keys: int, multiprocessors: int) -> int:
    """The parts of each program's keys."""
    if keys < LEAST_SPLIT:
        return 1
    return max(1, min(2 * multiprocessors // programs, triton.cdiv(keys, LEAST_KEYS), MOST_PARTS))


def empty_parts(call: AttentionLaunch, parts: int) -> tuple[Tensor, Tensor]:
    """Sums [parts, B, Hq, Sq, Dv]; largest score and total [parts, B, Hq, Sq, 2]."""
    shape = parts, *call.q.shape[:3]
    empty = functools.partial(torch.empty, dtype=torch.float32, device=call.q.device)
    return empty((*shape, call.v.shape[3])), empty((*shape, 2))


def join(call: AttentionLaunch, sums: Tensor, softmax: Tensor, out: Tensor, lse: Tensor) -> None:
    arguments = call.arguments()
    names = ("sinks", "heads", "queries", "MAP", "V_WIDTH", "DV")
    join_kernel[(lse.numel(),)](
        sums,
        softmax,
        out,
        lse,
        parts=sums.shape[0],
        rows=lse.numel(),
        PARTS=triton.next_power_of_2(sums.shape[0]),
        enable_fp_fusion=True,
        **{name: arguments[name] for name in names},
    )


@launched
@triton.jit(do_not_specialize=["parts", "rows", "heads", "queries"])
def join_kernel(
    sums,
    softmax,
    out,
    lse,
    parts,
    rows,
    sinks,
    heads,
    queries,
    MAP: tl.constexpr,
    V_WIDTH: tl.constexpr,
    DV: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Joins the parts of row program_id(0) of lse."""
    row = tl.program_id(0).to(tl.int64)
    h, i = row // queries % heads, row % queries
    d, part = tl.arange(0, DV), tl.arange(0, PARTS)
    at, there = part * rows.to(tl.int64) + row, part < parts
    exact: tl.constexpr = out.dtype.element_ty == tl.float32
    # All loads start before the first result is used. In turn they would take most of a short call.
    largest = tl.load(softmax + 2 * at, there, LOWEST)
    totals = tl.load(softmax + 2 * at + 1, there, 0)
    mask = there[:, None] & (d < V_WIDTH)[None, :]
    tiles = tl.load(sums + at[:, None] * V_WIDTH + d[None, :], mask, 0)
    max_score = tl.max(largest, 0)
    factor = exponential(largest - max_score, MAP, exact)
    acc = tl.sum(tiles * factor[:, None], 0)
    total = tl.sum(totals * factor, 0)
    sink = None if sinks is None else tl.load(sinks + h)
    share, row_lse = denominator(max_score, total, sink, MAP)
    tl.store(lse + row, row_lse)
    to = out + ((row // (heads * queries) * queries + i) * heads + h) * V_WIDTH
    tl.store(to + d, (acc * share).to(out.dtype.element_ty), d < V_WIDTH)
