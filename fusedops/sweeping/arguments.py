"""Checks the arguments of `fusedops.sweep`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
from fusedops.sweeping.modes import MODES
from fusedops.sweeping.variants import EAGER, variant

__all__ = ["Asked", "checked"]


@dataclass(frozen=True)
class Asked:
    """The arguments, as `fusedops.sweep` describes them; batches and lengths are ascending."""

    make_batch: Callable[[int, int | None], Any]
    model: nn.Module | None
    step: Callable[[Any], object] | None
    optimizer: torch.optim.Optimizer | None
    batches: tuple[int, ...]
    lengths: tuple[int | None, ...]
    mode: str
    variants: tuple[str, ...]
    budget_s: float
    memory_limit: float | int


def checked(
    make_batch: Any,
    model: Any,
    step: Any,
    optimizer: Any,
    batch: Any,
    length: Any,
    mode: Any,
    variants: Any,
    budget_s: Any,
    memory_limit: Any,
    on_gpu: bool = False,
) -> Asked:
    """Raises TypeError or ValueError for what cannot be swept. on_gpu: the model may be on one."""
    if (model is None) == (step is None):
        got = "neither" if model is None else "both"
        raise ValueError(f"sweep: needs either model or step, got {got}")
    check_types(
        "sweep",
        make_batch=a_function(make_batch, "a function of batch and length"),
        optimizer=an_optimizer(optimizer, optional=True),
        **{"model": a_model(model)} if step is None else {"step": a_function(step)},
    )
    check_one_of("sweep", "mode", mode, MODES)
    if optimizer is not None and mode != "train":
        raise ValueError(f'sweep: optimizer must be None unless mode is "train", got mode {mode!r}')
    check_positive("sweep", "budget_s", budget_s)
    _check_limit(memory_limit)
    if not on_gpu:
        check_on_cpu("sweep", model)
    lengths = (None,) if length is None else _integers("length", length)
    return Asked(
        make_batch,
        model,
        step,
        optimizer,
        _integers("batch", batch),
        lengths,
        mode,
        _names(variants, mode, model),
        float(budget_s),
        memory_limit,
    )


def _check_limit(limit: Any) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(
            f"sweep: memory_limit must be bytes or a fraction, got {type(limit).__name__}"
        )
    if not (limit > 0 if isinstance(limit, int) else 0 < limit <= 1):
        raise ValueError(
            f"sweep: memory_limit must be bytes as an int above 0, or a float above 0 and up to 1, "
            f"got {limit}"
        )


def _integers(name: str, given: Any) -> tuple[int, ...]:
    """The sizes of an axis, ascending, each once."""
    values = (given,) if isinstance(given, int) else given
    if not isinstance(values, Iterable):
        raise TypeError(f"sweep: {name} must be integers, got {type(given).__name__}")
    sizes = tuple(values)
    for value in sizes:
        check_whole("sweep", name, value)
    if not sizes:
        raise ValueError(f"sweep: {name} must have at least one size, got none")
    return tuple(sorted(set(sizes)))


def _names(variants: Sequence[str], mode: str, model: Any) -> tuple[str, ...]:
    """The variants that are measured: with a step of the user's own, "eager" alone."""
    names = (variants,) if isinstance(variants, str) else tuple(variants)
    if not names:
        raise ValueError("sweep: variants must have at least one name, got none")
    if len(set(names)) < len(names):
        raise ValueError(f"sweep: variants must differ, got {names}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"sweep: variants must be names, got {type(name).__name__}")
        variant(name, mode)
    if model is not None:
        return names
    if names not in ((EAGER,), (EAGER, "patched")):
        raise ValueError(f'sweep: variants must be "eager" for a step of your own, got {names}')
    return (EAGER,)
