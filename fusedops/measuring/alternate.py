"""Alternates contenders in rounds, so that all of them share a machine's slow phases.

Ratios are taken within a round (`fusedops.measuring.ratios.paired_ratio`), never between runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

__all__ = ["Rounds", "TooSlow", "alternate", "rotated"]

T = TypeVar("T")
Order = Callable[[Sequence[T], int], Sequence[T]]


class TooSlow(TimeoutError):
    """The deadline came before the fewest rounds were done."""


@dataclass(frozen=True)
class Rounds:
    """How many rounds to run: at least `fewest`, at most `most`, in about `seconds`.

    deadline: a `perf_counter` time. If the fewest rounds are not done by then, TooSlow is raised;
    the first round is always run.
    """

    fewest: int
    most: int
    seconds: float
    deadline: float = math.inf

    def has_another(self, done: int, start: float) -> bool:
        """Whether another round begins after `done` rounds that began at `start`."""
        if done < self.fewest:
            if done and perf_counter() > self.deadline:
                raise TooSlow(f"the budget had time for {done} of at least {self.fewest} rounds")
            return True
        return done < self.most and perf_counter() < start + self.seconds


def rotated(contenders: Sequence[T], number: int) -> Sequence[T]:
    """A round's order: each round starts with another contender, so two alternate AB, BA."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def alternate(
    contenders: Sequence[T], rounds: Rounds, order: Order = rotated
) -> Iterator[tuple[int, T]]:
    """Gives (round, contender) for each contender of each round; the caller runs it.

    Raises TooSlow, see `Rounds`.
    """
    start, done = perf_counter(), 0
    while rounds.has_another(done, start):
        for contender in order(contenders, done):
            yield done, contender
        done += 1
