"""Defines a workload to profile: its training step, data and changes, and a timed epoch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fusedops.measuring.clock import preempted_seconds

__all__ = ["Block", "Workload", "causal_step", "epoch"]

Block = Callable[[], float]  # trains on the same samples each time; returns seconds a step


@dataclass(frozen=True)
class Workload:
    """Arguments of fusedops.profile, and blocks of steps with and without a change.

    about: what is trained on what, in a sentence. changes: advice's id -> a function that gives the
    blocks without the change and with it, for advice that `Profile.measure` cannot try. Both train
    on the same samples, so their seconds a step can be compared.
    """

    about: str
    step: Callable[[Any], Any]
    data: Iterable[Any]
    model: nn.Module
    optimizer: Optimizer
    changes: dict[str, Callable[[], tuple[Block, Block]]] = field(default_factory=dict)


def causal_step(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], None]:
    """A training step of a causal language model, whose labels are its tokens."""

    def step(tokens: Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def epoch(
    step: Callable[[Any], Any], data: Iterable[Any], *, skipped: int = 0, wall: bool = False
) -> float:
    """Trains on all batches and returns the total seconds of the timed ones.

    skipped: how many batches at the start are not timed, while a loader's workers catch up.
    wall: count the time in which other programs, such as a loader's workers, had the CPU.
    """
    held, start = 0.0, 0.0
    for index, batch in enumerate(data):
        if index == skipped:
            held, start = preempted_seconds(), perf_counter()
        step(batch)
    seconds = perf_counter() - start
    return seconds if wall else max(0.02 * seconds, seconds - (preempted_seconds() - held))
