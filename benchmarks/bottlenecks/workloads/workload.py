"""What a workload is: a training step, its data, and the changes that it can make itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fusedops.profiling.collect.clock import preempted_seconds

__all__ = ["Block", "Workload", "epoch"]

Block = Callable[[], float]  # trains on the same samples each time; returns seconds a step


@dataclass(frozen=True)
class Workload:
    """Arguments of fusedops.profile, and blocks of steps with and without a change.

    about: what is trained on what, in a sentence. changes: advice's id -> a function that gives the
    blocks without the change and with it, for advice that `Profile.measure` cannot try. Both train
    on the same samples, so their seconds a step of `plain`'s batch compare.
    """

    about: str
    step: Callable[[Any], Any]
    data: Iterable[Any]
    model: nn.Module
    optimizer: Optimizer
    changes: dict[str, Callable[[], tuple[Block, Block]]] = field(default_factory=dict)


def epoch(
    step: Callable[[Any], Any], data: Iterable[Any], *, skipped: int = 0, wall: bool = False
) -> float:
    """Trains on all batches, and returns the seconds of those that are not skipped.

    skipped: batches at the start that are not timed, until a loader's workers have caught up.
    wall: count the time in which other programs had the CPU, of which a loader's workers are some.
    """
    held, start = 0.0, 0.0
    for index, batch in enumerate(data):
        if index == skipped:
            held, start = preempted_seconds(), perf_counter()
        step(batch)
    seconds = perf_counter() - start
    return seconds if wall else max(0.02 * seconds, seconds - (preempted_seconds() - held))
