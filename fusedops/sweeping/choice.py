"""Chooses a sweep's best row: within a latency budget, or where throughput stops growing."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from fusedops.measuring.arguments import check_one_of, check_positive
from fusedops.measuring.units import seconds_text
from fusedops.sweeping.row import SweepRow

__all__ = ["GOALS", "KNEE", "best", "gain", "knee", "knees", "named", "stops_growing"]

GOALS = ("throughput", "latency", "knee")
KNEE = 0.1  # twice the batch gives less than 10 % more throughput


def gain(before: SweepRow, after: SweepRow) -> float:
    """How much more throughput the larger batch gives, for each doubling of the batch."""
    assert before.throughput is not None and after.throughput is not None
    doublings = math.log2(after.batch / before.batch)
    return (after.throughput / before.throughput) ** (1 / doublings) - 1


def stops_growing(before: SweepRow, after: SweepRow) -> bool:
    """Whether the larger batch gives too little more throughput, beyond the rows' intervals."""
    if gain(before, after) >= KNEE:
        return False
    if not (before.noisy or after.noisy) or not (before.p50_interval and after.p50_interval):
        return True
    # What the gain is if the smaller batch was as slow, and the larger one as fast, as they may be.
    slow, fast = (
        before.p50_interval[1] / (before.p50 or 1),
        after.p50_interval[0] / (after.p50 or 1),
    )
    doublings = math.log2(after.batch / before.batch)
    return (1 + gain(before, after)) * (slow / fast) ** (1 / doublings) - 1 < KNEE


def knee(rows: Iterable[SweepRow]) -> SweepRow | None:
    """The last row before throughput stops growing; None if it grows to the end.

    rows: of one variant and one length.
    """
    measured = sorted((r for r in rows if r.throughput is not None), key=lambda row: row.batch)
    for before, after in pairwise(measured):
        if stops_growing(before, after):
            return before
    return None


def knees(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The knee of each variant and length that has one."""
    curves = dict.fromkeys((row.variant, row.length) for row in rows)
    at_knees = (knee(r for r in rows if (r.variant, r.length) == curve) for curve in curves)
    return [row for row in at_knees if row is not None]


def best(rows: Sequence[SweepRow], p95: float | None, goal: str) -> SweepRow:
    """See `Sweep.best`."""
    check_one_of("best", "goal", goal, GOALS)
    if p95 is not None:
        check_positive("best", "p95", p95)
    measured = [row for row in rows if row.throughput is not None]
    if not measured:
        raise ValueError("best: no row was measured")
    candidates = knees(rows) if goal == "knee" else measured
    if not candidates:
        last = max(measured, key=_throughput)
        raise ValueError(
            f"best: no curve has a knee, throughput grows to the largest batch; the most has "
            f"{named(last)}"
        )
    if p95 is not None:
        candidates = _within(candidates, p95)
    return min(candidates, key=_latency) if goal == "latency" else max(candidates, key=_throughput)


def _within(rows: Sequence[SweepRow], p95: float) -> list[SweepRow]:
    """The rows whose p95 meets the budget."""
    with_p95 = [row for row in rows if row.p95 is not None]
    if not with_p95:
        raise ValueError(
            "best: p95 needs rows of 20 samples, and none has as many: give sweep a larger budget_s"
        )
    within = [row for row in with_p95 if row.p95 is not None and row.p95 <= p95]
    if not within:
        nearest = min(with_p95, key=lambda row: row.p95 or 0.0)
        raise ValueError(
            f"best: no row has a p95 of at most {seconds_text(p95)}; the nearest is "
            f"{named(nearest)}, with {seconds_text(nearest.p95 or 0.0)}"
        )
    return within


def named(row: SweepRow) -> str:
    """patched, batch 4, length 256: which point a row is of."""
    length = "" if row.length is None else f", length {row.length}"
    return f"{row.variant}, batch {row.batch}{length}"


def _throughput(row: SweepRow) -> float:
    return row.throughput or 0.0


def _latency(row: SweepRow) -> float:
    return row.p50 or math.inf
