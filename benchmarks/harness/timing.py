"""Times contenders in rounds, with clocks and counters of the device.

In one round every contender runs a block of calls, in an order shuffled for each round.
"""

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from fusedops.measuring.alternate import Rounds, alternate

Call = Callable[[], object]
Timed = tuple[Call, Callable[[], AbstractContextManager]]  # call, scope
Stopwatch = Callable[[int], float]  # number of calls -> seconds per call
Clock = Callable[[Call], Stopwatch]

BLOCK_S = 0.01  # long compared with the clock and the loop, short compared with other load
ROUNDS, AIM = (7, 60), 30  # fewest, most, and the target number in a budget


@dataclass(frozen=True)
class Machine:
    """A device and its clocks by name.

    lost: says why the device can run nothing more in this process; None if it can.
    """

    device: torch.device
    clocks: Mapping[str, Clock]
    lost: Callable[[], str | None] = lambda: None


def wall(call: Call) -> Stopwatch:
    """Wall-clock time, after one untimed call that restores the caches and the allocator.

    A call that fills the block by itself needs no untimed call.
    """

    def seconds(repeats: int) -> float:
        if repeats > 1:
            call()
        start = perf_counter()
        for _ in range(repeats):
            call()
        return (perf_counter() - start) / repeats

    return seconds


CPU = Machine(torch.device("cpu"), {"wall": wall})


def interleaved(
    contenders: Mapping[str, Timed], budget_s: float, clock: Clock = wall
) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round, about `budget_s` seconds in total."""
    block_s = min(BLOCK_S, budget_s / AIM / max(1, len(contenders)))
    blocks = {name: _block(*timed, clock, block_s) for name, timed in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with _no_gc():
        for _, name in alternate([*contenders], Rounds(*ROUNDS, budget_s), _shuffled()):
            seconds[name].append(blocks[name]())
    return seconds


def _shuffled() -> Callable[[Sequence[str], int], list[str]]:
    draw = random.Random(0)
    return lambda names, _: draw.sample(names, len(names))


def _block(call: Call, scope: Callable, clock: Clock, block_s: float) -> Callable[[], float]:
    """Times one block of calls, as many as fill `block_s`."""
    with scope():
        stopwatch = clock(call)
        repeats = _repeats(stopwatch, block_s)

    def block() -> float:
        with scope():
            return stopwatch(repeats)

    return block


def _repeats(stopwatch: Stopwatch, block_s: float) -> int:
    """Returns how many calls fill a block, from the fastest of three tries: noise only adds time.

    It uses wall-clock time, because a clock may show less time than its measurement takes.
    """

    def cost() -> float:
        start = perf_counter()
        stopwatch(1)
        return perf_counter() - start

    cost()
    return max(1, round(block_s / min(cost() for _ in range(3))))


@contextmanager
def _no_gc() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
