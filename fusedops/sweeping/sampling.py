"""Times variants in turn on one batch, and repeats rounds that other programs disturbed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from fusedops.measuring.clock import preempted_seconds, withheld
from fusedops.measuring.quantiles import FEWEST
from fusedops.sweeping.modes import Run, Timed

__all__ = ["Samples", "TooSlow", "sample"]

MOST = 100  # rounds: then p99 has its samples
DISTURBED = 0.02  # share of a run in which this thread waited for a CPU, or it was withheld
NOISY = 0.1  # share of disturbed runs that makes a row noisy


class TooSlow(TimeoutError):
    """The deadline came before the fewest rounds were done."""


@dataclass
class Samples:
    """The runs of one variant, one a round. disturbed: which of them other programs disturbed."""

    runs: list[Timed] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [run.seconds for run in self.runs]

    @property
    def latencies(self) -> list[float]:
        return [one for run in self.runs for one in run.latencies]

    @property
    def noisy(self) -> bool:
        return sum(self.disturbed) > NOISY * len(self.disturbed)


def sample(
    runs: Sequence[Run], batch: Any, seconds: float, deadline: float, repeats_end: float = math.inf
) -> list[Samples]:
    """Runs all of them in turn, from another one in each round, for about `seconds`.

    At least 6 rounds, at most 100. A round that was disturbed is repeated once, with all of its
    runs, so that rounds stay pairs; repeats take as long again at most, and none begins after
    `repeats_end`. Raises TooSlow if 6 rounds are not done at the deadline.
    """
    found = [Samples() for _ in runs]
    start = perf_counter()
    while (n := len(found[0].runs)) < FEWEST or (n < MOST and perf_counter() < start + seconds):
        if n and n < FEWEST and perf_counter() > deadline:
            raise TooSlow(f"the budget had time for {n} of at least {FEWEST} rounds")
        for i, run in _rotated(runs, n):
            timed, disturbed = _watched(run, batch)
            found[i].runs.append(timed)
            found[i].disturbed.append(disturbed)
    took = perf_counter() - start
    _repeat(runs, batch, found, min(deadline, repeats_end, start + took + max(seconds, took)))
    return found


def _repeat(runs: Sequence[Run], batch: Any, found: list[Samples], deadline: float) -> None:
    """Measures disturbed rounds again, each once, until the deadline."""
    for n in range(len(found[0].runs)):
        if not any(samples.disturbed[n] for samples in found):
            continue
        if perf_counter() > deadline:
            return
        for i, run in _rotated(runs, n):
            found[i].runs[n], found[i].disturbed[n] = _watched(run, batch)


def _rotated(runs: Sequence[Run], n: int) -> list[tuple[int, Run]]:
    order = [*enumerate(runs)]
    first = n % len(order)
    return order[first:] + order[:first]


def _watched(run: Run, batch: Any) -> tuple[Timed, bool]:
    """A run, and whether other programs or the hypervisor had its CPU meanwhile."""
    waited, (stolen, ticks) = preempted_seconds(), withheld()
    timed = run(batch)
    waited, (stolen_then, ticks_then) = preempted_seconds() - waited, withheld()
    stolen_share = (stolen_then - stolen) / max(1, ticks_then - ticks)
    return timed, waited / timed.seconds > DISTURBED or stolen_share > DISTURBED
