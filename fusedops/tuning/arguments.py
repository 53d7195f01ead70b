"""Checks the arguments of `fusedops.tune`."""

from typing import Any

from fusedops.measuring.arguments import (
    a_function,
    a_model,
    an_optimizer,
    check_on_cpu,
    check_one_of,
    check_positive,
    check_types,
    check_whole,
)
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
    check_types(
        "tune",
        make_batch=a_function(make_batch, "a function of batch and length"),
        model=a_model(model),
        optimizer=an_optimizer(optimizer),
        memory=(memory, isinstance(memory, int | None), "bytes as an integer, or None"),
    )
    check_on_cpu("tune", model)
    check_whole("tune", "batch", batch)
    check_one_of("tune", "goal", goal, GOALS)
    check_positive("tune", "budget_s", budget_s)
    if p95 is not None:
        check_positive("tune", "p95", p95)
    if memory is not None:
        check_positive("tune", "memory", memory, "bytes")
    names = list(KNOBS) if knobs is None else [knobs] if isinstance(knobs, str) else list(knobs)
    for name in names:
        if name not in KNOBS:
            raise ValueError(f"tune: knobs must be among {', '.join(KNOBS)}, got {name!r}")
    return names
