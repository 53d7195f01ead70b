"""Runs an A/B experiment on one change, in alternating blocks of steps."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from time import perf_counter

from fusedops.measuring.clock import running_seconds
from fusedops.measuring.ratios import Ratio, paired_ratio
from fusedops.profiling.advice.advice import Saving

__all__ = ["TooSlow", "compare_blocks", "fewest_seconds", "ratio_of", "saving"]

BLOCK = 3  # steps of a block that are timed, after one that is not
FEWEST, MOST = 12, 60  # pairs of blocks

Change = Callable[[], AbstractContextManager[object]]
Call = Callable[[], object]


class TooSlow(TimeoutError):
    """A change makes the step so slow that the budget has no time for the fewest blocks."""


def fewest_seconds(step: float, untimed: int = 1) -> float:
    """How long the fewest blocks take if a step takes `step` seconds with the change too."""
    return 2 * FEWEST * (untimed + BLOCK) * step


def compare_blocks(
    call: Call,
    change: Change,
    budget_s: float,
    untimed: int = 1,
    seconds_of: Callable[[Call], float] = running_seconds,
) -> tuple[list[float], list[float]]:
    """Median seconds of each block without the change, and of each block with it.

    The order alternates (AB, BA), so that a machine that becomes slower favours neither. untimed:
    steps at a block's begin. seconds_of: times a call; by default time in which other programs had
    the CPU is left out. Raises TooSlow if the fewest blocks are not done after twice the budget.
    """

    def block() -> float:
        for _ in range(untimed):
            call()
        return median(seconds_of(call) for _ in range(BLOCK))

    without: list[float] = []
    changed: list[float] = []
    deadline = perf_counter() + budget_s
    while len(without) < FEWEST or (len(without) < MOST and perf_counter() < deadline):
        if len(without) % 2 == 0:
            without.append(block())
        with change():
            changed.append(block())
        if len(without) < len(changed):
            without.append(block())
        if len(without) < FEWEST and perf_counter() > deadline + budget_s:
            raise TooSlow("the change makes the step too slow for the budget")
    return without, changed


def ratio_of(without: list[float], changed: list[float]) -> Ratio:
    """The paired ratio of the blocks, two rounds (AB and BA) together.

    The second block of a round runs on warmer caches, and that cancels out in two rounds.
    """
    pairs = len(without) // 2 * 2
    base, other = ([v[i] + v[i + 1] for i in range(0, pairs, 2)] for v in (without, changed))
    return _expanded(paired_ratio(base, other), len(base))


def _expanded(ratio: Ratio, n: int) -> Ratio:
    """Widens a percentile bootstrap's interval, which is too narrow for few samples.

    By sqrt(n / (n - 1)) and Student's t over the normal quantile (Hesterberg, arXiv:1411.5279),
    with t from its expansion in 1 / (n - 1).
    """
    z, free = 1.96, max(1, n - 1)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    power = t / z * math.sqrt(n / free)
    low, high = (ratio.median * (end / ratio.median) ** power for end in (ratio.low, ratio.high))
    return Ratio(ratio.median, low, high)


def saving(without: list[float], changed: list[float], bytes_saved: int | None = None) -> Saving:
    """What a change saves of a step, with the 95 % interval of the paired ratio."""
    base = median(without)
    ratio = ratio_of(without, changed)
    low, middle, high = (base * (1 - 1 / r) for r in (ratio.low, ratio.median, ratio.high))
    return Saving(seconds=middle, bytes=bytes_saved, interval=(low, high), step=base)
