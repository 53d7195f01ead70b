"""Compares a step with and without a change, in alternating blocks of steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter

from fusedops.measuring.alternate import Rounds, alternate
from fusedops.measuring.clock import running_seconds
from fusedops.measuring.ratios import Ratio, expanded, paired_ratio

__all__ = ["FEWEST", "SHORT", "compare_blocks", "fewest_seconds", "ratio_of"]

BLOCK = 3  # steps of a block that are timed, after one that is not
FEWEST, MOST = 12, 60  # pairs of blocks
SHORT = 6  # pairs of blocks, where the budget has no time for the fewest

Change = Callable[[], AbstractContextManager[object]]
Call = Callable[[], object]


def fewest_seconds(step: float, untimed: int = 1, pairs: int = FEWEST) -> float:
    """How long the fewest blocks take if a step takes `step` seconds with the change too."""
    return 2 * pairs * (untimed + BLOCK) * step


def compare_blocks(
    call: Call,
    change: Change,
    budget_s: float,
    untimed: int = 1,
    seconds_of: Callable[[Call], float] = running_seconds,
    pairs: int = FEWEST,
) -> tuple[list[float], list[float]]:
    """Median seconds of each block without the change, and of each block with it.

    untimed: steps run before each block's timing starts. seconds_of: times a call; by default time
    in which other programs had the CPU is left out. pairs: the fewest of blocks. Raises TooSlow if
    they are not done after twice the budget.
    """

    def block() -> float:
        for _ in range(untimed):
            call()
        return median(seconds_of(call) for _ in range(BLOCK))

    blocks: dict[bool, list[float]] = {False: [], True: []}
    rounds = Rounds(pairs, MOST, budget_s, perf_counter() + 2 * budget_s)
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
    return expanded(paired_ratio(base, other), len(base))
