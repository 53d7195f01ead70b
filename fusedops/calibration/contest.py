"""Times one call by our kernel and by torch's code, and checks both results."""

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.measuring.alternate import Rounds, alternate
from fusedops.measuring.clock import wall_seconds
from fusedops.testing import errors

__all__ = ["Case", "Contest", "drawn_size", "measured_ratio", "wrong"]

ROUNDS = Rounds(fewest=5, most=60, seconds=0.05)
FAR = {3: 2.5, 6: 1.3}  # rounds, and a ratio after which no more are needed
CHANCE = 8  # times torch's error: few numbers were drawn once, and a wrong result is far beyond
SAMPLE = 1e-4  # seconds: shorter calls are repeated within a sample

Results = Callable[[], Tensor | tuple[Tensor, ...]]


class Contest(NamedTuple):
    """Functions that return the call's outputs, or its gradients if it trains.

    exact: the same from float64 inputs; None if the results are random.
    """

    ours: Results
    torchs: Results
    exact: Results | None
    trains: bool


class Case(NamedTuple):
    """A call of a grid. kind: its family, dtype and so on, in words. make: makes its tensors."""

    kind: str
    sizes: tuple[int, ...]
    make: Callable[[], Contest]


def drawn_size(random: Random, least: int, most: int) -> int:
    """A size whose logarithm is evenly distributed."""
    return round(2 ** random.uniform(math.log2(least), math.log2(most)))


def measured_ratio(contest: Contest, rounds: Rounds = ROUNDS) -> float:
    """Our seconds over torch's, of each side's fastest sample.

    Other programs make samples longer, those with several threads most of all, and never shorter.
    """
    samples: tuple[list[float], list[float]] = [], []
    with torch.set_grad_enabled(contest.trains):
        contest.torchs()  # not timed: the first call may allocate and compile
        contest.ours()
        repeats = max(1, round(SAMPLE / wall_seconds(contest.ours)))
        runs = _repeated(contest.ours, repeats), _repeated(contest.torchs, repeats)
        for number, i in alternate((0, 1), rounds):
            if len(samples[0]) == len(samples[1]) == number and _is_far(_ratio(samples), number):
                break
            samples[i].append(wall_seconds(runs[i]))
    return _ratio(samples)


def _repeated(results: Results, repeats: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeats):
            results()

    return run


def _ratio(samples: tuple[list[float], list[float]]) -> float:
    ours, torchs = samples
    return min(ours) / min(torchs) if ours else 1.0


def _is_far(ratio: float, rounds: int) -> bool:
    """Whether a ratio is so far from 1 that more rounds cannot change the choice."""
    return any(rounds >= fewest and not 1 / limit < ratio < limit for fewest, limit in FAR.items())


def wrong(contest: Contest) -> str | None:
    """Describes how our results differ from torch's by more than rounding; None if they do not."""
    if contest.exact is None:
        return None
    with torch.set_grad_enabled(contest.trains):
        runs = contest.ours, contest.torchs, contest.exact
        results = [_as_tuple(run()) for run in runs]
    complaints = (_complaint(*tensors) for tensors in zip(*results, strict=True))
    return next((text for text in complaints if text is not None), None)


def _complaint(ours: Tensor, torchs: Tensor, exact: Tensor) -> str | None:
    compared = errors(ours, torchs, exact, rows=False)
    return compared if isinstance(compared, str) else compared.complaint(CHANCE)


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results
