"""Checks the arguments of `fusedops.tune`."""

from typing import Any

import torch
from torch import nn

from fusedops.sweeping.arguments import check_on_cpu
from fusedops.tuning.knobs import KNOBS
from fusedops.tuning.rules import GOALS

__all__ = ["checked"]


def checked(
    make_batch: Any,
    model: Any,
    optimizer: Any,
    batch: Any,
    goal: Any,
    p95: Any,
    memory: Any,
    knobs: Any,
    budget_s: Any,
) -> list[str]:
    """The names of the knobs. Raises TypeError or ValueError for what cannot be tuned."""
    wanted = {
        "make_batch": (make_batch, callable(make_batch), "a function of batch and length"),
        "model": (model, isinstance(model, nn.Module), "a torch.nn.Module"),
        "optimizer": (
            optimizer,
            isinstance(optimizer, torch.optim.Optimizer),
            "a torch.optim.Optimizer",
        ),
        "batch": (batch, isinstance(batch, int) and not isinstance(batch, bool), "an integer"),
        "memory": (memory, isinstance(memory, int | None), "bytes as an integer, or None"),
    }
    for name, (value, fits, what) in wanted.items():
        if not fits:
            raise TypeError(f"tune: {name} must be {what}, got {type(value).__name__}")
    check_on_cpu("tune", model)
    if batch < 1:
        raise ValueError(f"tune: batch must be at least 1, got {batch}")
    if goal not in GOALS:
        raise ValueError(f"tune: goal must be one of {', '.join(GOALS)}, got {goal!r}")
    if not isinstance(budget_s, int | float):
        raise TypeError(f"tune: budget_s must be seconds, got {type(budget_s).__name__}")
    for name, value in (("p95", p95), ("memory", memory), ("budget_s", budget_s)):
        if value is not None and not value > 0:
            raise ValueError(f"tune: {name} must be more than 0, got {value}")
    names = list(KNOBS) if knobs is None else [knobs] if isinstance(knobs, str) else list(knobs)
    for name in names:
        if name not in KNOBS:
            raise ValueError(f"tune: knobs must be among {', '.join(KNOBS)}, got {name!r}")
    return names
