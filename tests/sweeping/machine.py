"""A fake clock that only the measured steps advance, so that tests know every latency."""

import random
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from fusedops.measuring import alternate, sampling
from fusedops.sweeping import modes, run

FIXED, PER_SAMPLE, SATURATED = 8e-3, 1e-3, 4e-3
TAIL, SLOWER = 0.2, 2.0  # a fifth of the steps takes twice as long


class Machine:
    """seconds: the time. elsewhere: seconds that other programs had the CPU."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.elsewhere = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch, *more: ModuleType) -> None:
        """Replaces the clocks that a sweep and these modules read."""
        clocks: tuple[ModuleType, ...] = (alternate, modes, run, sampling, *more)
        for module in clocks:
            monkeypatch.setattr(module, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(sampling, "preempted_seconds", lambda: self.elsewhere)
        monkeypatch.setattr(sampling, "withheld", lambda: (0, 0))


def cost(batch: int) -> float:
    """Seconds of a step: throughput grows until 8 samples, and not beyond."""
    return FIXED + PER_SAMPLE * batch if batch <= 8 else 2e-3 * batch


def tailed(machine: Machine, seed: int) -> Callable[[torch.Tensor], None]:
    """A step of known cost whose tail is known too."""
    draw = random.Random(seed)

    def step(batch: torch.Tensor) -> None:
        slower = SLOWER if draw.random() < TAIL else 1.0
        machine.seconds += cost(len(batch)) * slower * draw.uniform(0.98, 1.02)

    return step
