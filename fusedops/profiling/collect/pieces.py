"""Times parts of a step with and without a change, in alternating (ABBA) blocks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from fusedops.measuring.alternate import Rounds, alternate

__all__ = ["FEWEST", "ROUNDS", "Piece", "Timing", "time_pieces"]

ROUNDS, FEWEST = 10, 4  # pairs of blocks of a piece; fewer of a long one
TIMED_S = 20e-3  # of a piece, before and after
CYCLES = 10  # at most so many repetitions in a block


class Piece(Protocol):
    """Something that can be repeated, as it was and changed. seconds: of one, roughly."""

    seconds: float

    def warm_up(self, changed: bool) -> None: ...

    def timed(self, changed: bool) -> float: ...


P = TypeVar("P", bound=Piece)
Around = Callable[[bool], AbstractContextManager[object]]


def _nothing(changed: bool) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Timing(Generic[P]):
    """Pieces that stand for one another, and their times in pairs of blocks."""

    samples: Sequence[P]
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def warm_up(self, around: Around = _nothing) -> None:
        for changed in (False, True):
            with around(changed):
                for piece in self.samples:
                    piece.warm_up(changed)

    @property
    def seconds(self) -> float:
        """Rough seconds of one piece."""
        return median(piece.seconds for piece in self.samples)

    @property
    def repetitions(self) -> int:
        """Repetitions of a piece in a block."""
        return max(1, min(CYCLES, int(TIMED_S / ROUNDS / self.seconds)))

    def sample(self, number: int) -> P:
        return self.samples[number % len(self.samples)]


def time_pieces(timings: Sequence[Timing], deadline: float, around: Around = _nothing) -> None:
    """Times a pair of blocks of each piece in every round; of a long piece, in fewer rounds.

    around: entered for the blocks before (False) and after the change (True). No round but the
    fewest begins after `deadline`, a `perf_counter` time.
    """
    limits = Rounds(FEWEST, ROUNDS, deadline - perf_counter())
    for done, changed in alternate((False, True), limits):
        due = [t for t in timings if done < FEWEST or done * t.seconds < TIMED_S]
        with around(changed):
            _blocks(due, changed, done)


def _blocks(timings: Sequence[Timing], changed: bool, first: int) -> None:
    """Times a block of each piece: each once, then each again, and so on.

    As in a step, others run between two runs of the same one, and use the caches.
    """
    times: list[list[float]] = [[] for _ in timings]
    for cycle in range(CYCLES):
        for timing, seconds in zip(timings, times, strict=True):
            if cycle < timing.repetitions:
                seconds.append(timing.sample(first + cycle).timed(changed))
    for timing, seconds in zip(timings, times, strict=True):
        (timing.after if changed else timing.before).append(median(seconds))
