"""Runs a measured step again in experiments, as far as a time budget allows."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from fusedops.measuring.driver import Driver
from fusedops.measuring.memory.measured import measure_memory
from fusedops.profiling.evidence import Evidence

__all__ = ["MEMORY", "Attempts"]

LARGEST = 10  # modules by what they save for backward
MEMORY = 3  # measuring the memory of a step takes less than so many steps

T = TypeVar("T")


class Attempts:
    """Experiments with a step; `evidence` has what they showed, and why others did not run.

    call: the step on a kept batch. deadline: a `perf_counter` time. after_each: called after each
    experiment.
    """

    def __init__(
        self,
        evidence: Evidence,
        call: Callable[[], Any],
        deadline: float,
        after_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.evidence, self.call, self.deadline = evidence, call, deadline
        self.after_each = after_each
        self.longest = median((evidence.cached or evidence.plain).seconds)

    def tried(
        self,
        part: str,
        steps: int,
        experiment: Callable[[], T],
        more_s: float = 0.0,
        reason: str = "",
    ) -> T | None:
        """The experiment's result; None and a note if there is none.

        steps, more_s: how long it takes. reason: why it is not to run.
        """
        reason = reason or self.no_time(steps, more_s)
        if not reason:
            try:
                return experiment()
            except Exception as error:  # noqa: BLE001  the user's step, in a mode or under hooks
                reason = f"a step raised {type(error).__name__}: {error}"
            finally:
                self.after_each()
        self.note(part, reason)
        return None

    def measure_memory(
        self,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        driver: Driver | None = None,
        more_s: float = 0.0,
        reason: str = "",
    ) -> None:
        """Adds a step's bytes. driver: of the GPU that it uses."""
        use = self.tried(
            "memory",
            MEMORY,
            lambda: measure_memory(self.call, model=model, optimizer=optimizer, driver=driver),
            more_s,
            reason,
        )
        if use is not None:
            sizes = {name: n for name, n in use.to_dict().items() if isinstance(n, int)}
            largest = dict(itertools.islice(use.modules.items(), LARGEST))
            self.add(memory=sizes, activations=largest)

    def no_time(self, steps: int, more_s: float) -> str:
        """Why an experiment that takes so long does not run; empty if it does."""
        late = perf_counter() + steps * self.longest + more_s > self.deadline
        return "the budget had no time for it" if late else ""

    def note(self, part: str, reason: str) -> None:
        """Adds why a part was not measured, if there is a reason."""
        if reason:
            self.add(not_checked=(*self.evidence.not_checked, f"{part}: {reason}"))

    def add(self, **parts: Any) -> None:
        """Adds fields of `Evidence`."""
        self.evidence = replace(self.evidence, **parts)
