"""Times runs in rounds, and repeats rounds that other programs disturbed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from fusedops.measuring.alternate import Rounds, alternate, rotated
from fusedops.measuring.clock import preempted_seconds, withheld
from fusedops.measuring.quantiles import FEWEST

__all__ = ["Batch", "Run", "Samples", "Timed", "sample"]

MOST = 100  # rounds: then p99 has its samples
DISTURBED = 0.02  # share of a run in which this thread waited for a CPU, or it was withheld
NOISY = 0.1  # share of disturbed runs that makes a row noisy

Batch = Any


@dataclass(frozen=True)
class Timed:
    """One run. seconds: all of it. tokens: each token's seconds, the first one's at the start."""

    seconds: float
    tokens: tuple[float, ...] = ()

    @property
    def latencies(self) -> tuple[float, ...]:
        """What quantiles are made of: the tokens after the first, else the whole run."""
        return self.tokens[1:] or (self.seconds,)


Run = Callable[[Batch], Timed]


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
        return [latency for run in self.runs for latency in run.latencies]

    @property
    def noisy(self) -> bool:
        return sum(self.disturbed) > NOISY * len(self.disturbed)


def sample(
    runs: Sequence[Run],
    batch: Any,
    seconds: float,
    deadline: float,
    repeats_end: float = math.inf,
    fewest: int = FEWEST,
) -> list[Samples]:
    """Runs every variant once per round, starting with a different one, for about `seconds`.

    At least `fewest` rounds, at most 100. A round that was disturbed is repeated once, with all of
    its runs, so that rounds stay pairs; repeats take as long again at most, and none begins after
    `repeats_end`. Raises TooSlow if the fewest rounds are not done at the deadline.
    """
    samples, start = [Samples() for _ in runs], perf_counter()
    for _, i in alternate(range(len(runs)), Rounds(fewest, MOST, seconds, deadline)):
        timed, disturbed = _watched(runs[i], batch)
        samples[i].runs.append(timed)
        samples[i].disturbed.append(disturbed)
    took = perf_counter() - start
    _repeat(runs, batch, samples, min(deadline, repeats_end, start + took + max(seconds, took)))
    return samples


def _repeat(runs: Sequence[Run], batch: Any, samples: list[Samples], deadline: float) -> None:
    """Measures disturbed rounds again, each once, until the deadline."""
    for n in range(len(samples[0].runs)):
        if not any(variant.disturbed[n] for variant in samples):
            continue
        if perf_counter() > deadline:
            return
        for i in rotated(range(len(runs)), n):
            samples[i].runs[n], samples[i].disturbed[n] = _watched(runs[i], batch)


def _watched(run: Run, batch: Any) -> tuple[Timed, bool]:
    """A run, and whether other programs or the hypervisor had its CPU meanwhile."""
    waited, (stolen, ticks) = preempted_seconds(), withheld()
    timed = run(batch)
    waited, (stolen_then, ticks_then) = preempted_seconds() - waited, withheld()
    stolen_share = (stolen_then - stolen) / max(1, ticks_then - ticks)
    return timed, waited / timed.seconds > DISTURBED or stolen_share > DISTURBED
