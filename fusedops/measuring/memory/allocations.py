"""Lifetimes and categories of memory allocations, and the peaks that they add up to."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

__all__ = [
    "ALWAYS",
    "CATEGORIES",
    "TEMPORARIES",
    "Allocation",
    "by_module",
    "held_at",
    "largest",
    "peak_of",
]

TEMPORARIES = "temporaries"
# A storage that was seen in two roles counts as the first.
CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "logits",
    "activations",
    "kv_cache",
    TEMPORARIES,
)
ALWAYS = -math.inf  # the start of what was there before the step


@dataclass
class Allocation:
    """One allocation: its bytes, when it began and ended, and what it held.

    The time is any number that grows. module: the path of the module that it belongs to.
    """

    bytes: int
    start: float = ALWAYS
    end: float = math.inf
    category: str = TEMPORARIES
    module: str = ""

    def hold(self, category: str, module: str = "") -> None:
        """Notes what the allocation holds, unless that is known and ranks higher."""
        if CATEGORIES.index(category) < CATEGORIES.index(self.category):
            self.category, self.module = category, module


def peak_of(allocations: Iterable[Allocation]) -> tuple[float, int]:
    """When the most bytes were alive for the first time, and how many."""
    changes = [change for allocation in allocations for change in _changes(allocation)]
    changes.sort(key=lambda change: (change[0], change[1] > 0))  # frees first
    sums = list(accumulate((change for _, change in changes), initial=0))
    peak = max(sums)
    at = sums.index(peak)
    return (changes[at - 1][0] if at else ALWAYS), peak


def _changes(allocation: Allocation) -> list[tuple[float, int]]:
    born = (allocation.start, allocation.bytes)
    return [born] if allocation.end == math.inf else [born, (allocation.end, -allocation.bytes)]


def held_at(allocations: Iterable[Allocation], time: float) -> dict[str, int]:
    """Bytes of each category that were alive at a time. They add up to all bytes alive."""
    held = dict.fromkeys(CATEGORIES, 0)
    for allocation in allocations:
        if allocation.start <= time < allocation.end:
            held[allocation.category] += allocation.bytes
    return held


def largest(allocations: Iterable[Allocation], category: str) -> int:
    """The most bytes of a category that were alive at the same time."""
    return peak_of([allocation for allocation in allocations if allocation.category == category])[1]


def by_module(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Bytes saved for backward by each module, when the most are; the largest first."""
    saved = [allocation for allocation in allocations if allocation.category == "activations"]
    time, _ = peak_of(saved)
    by_name: Counter[str] = Counter()
    for allocation in saved:
        if allocation.start <= time < allocation.end:
            by_name[allocation.module] += allocation.bytes
    return dict(by_name.most_common())
