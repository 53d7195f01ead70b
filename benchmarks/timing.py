"""Interleaved timing. A shared machine slows and recovers; contenders that take turns share that.

One round gives every contender a block of calls, in an order that is shuffled anew each round.
Ratios are then taken within a round (`fusedops.measure.paired_ratio`), never between runs.
"""

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

import torch

Timed = tuple[Callable[[], object], Callable[[], AbstractContextManager]]  # call, scope

BLOCK_S = 0.01  # long against the clock and the loop, short against a neighbour's bursts
ROUNDS, AIM = (7, 60), 30  # fewest and most, and how many a budget is to hold


def interleaved(contenders: Mapping[str, Timed], budget_s: float) -> dict[str, list[float]]:
    """Seconds a call of each contender in each round, about `budget_s` seconds in all."""
    block_s = min(BLOCK_S, budget_s / AIM / max(1, len(contenders)))
    repeats = {name: _repeats(*timed, block_s) for name, timed in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order, start, rounds = random.Random(0), perf_counter(), 0
    with _no_gc():
        while not _done(rounds, perf_counter() - start, budget_s):
            for name in order.sample(list(contenders), len(contenders)):
                seconds[name].append(_block(*contenders[name], repeats[name]))
            rounds += 1
    return seconds


def _done(rounds: int, elapsed_s: float, budget_s: float) -> bool:
    return rounds >= ROUNDS[1] or (rounds >= ROUNDS[0] and elapsed_s > budget_s)


def _block(call: Callable[[], object], scope: Callable, repeats: int) -> float:
    """Seconds a call, after one untimed call that takes the caches and the allocator back.

    A call that fills the block alone is long enough to go without.
    """
    with scope():
        if repeats > 1:
            call()
        synchronize()
        start = perf_counter()
        for _ in range(repeats):
            call()
        synchronize()
        return (perf_counter() - start) / repeats


def _repeats(call: Callable[[], object], scope: Callable, block_s: float) -> int:
    """How many calls fill a block; the least of three tries, as noise only adds."""
    _block(call, scope, 1)
    return max(1, round(block_s / min(_block(call, scope, 1) for _ in range(3))))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _no_gc() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
