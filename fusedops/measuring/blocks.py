"""Compares a step with and without a change, in alternating blocks of steps."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter

from fusedops.measuring.alternate import Rounds, alternate
from fusedops.measuring.clock import running_seconds
from fusedops.measuring.ratios import Ratio, paired_ratio

__all__ = ["compare_blocks", "fewest_seconds", "ratio_of"]

BLOCK = 3  # steps of a block that are timed, after one that is not
FEWEST, MOST = 12, 60  # pairs of blocks

Change = Callable[[], AbstractContextManager[object]]
Call = Callable[[], object]


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

    untimed: steps run before each block's timing starts. seconds_of: times a call; by default time
    in which other programs had the CPU is left out. Raises TooSlow if the fewest blocks are not
    done after twice the budget.
    """

    def block() -> float:
        for _ in range(untimed):
            call()
        return median(seconds_of(call) for _ in range(BLOCK))

    blocks: dict[bool, list[float]] = {False: [], True: []}
    rounds = Rounds(FEWEST, MOST, budget_s, perf_counter() + 2 * budget_s)
    for _, changed in alternate((False, True), rounds):
        with change() if changed else nullcontext():
            blocks[changed].append(block())
    return blocks[False], blocks[True]


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
