"""`SweepRequest`: the checked arguments of `fusedops.sweep`."""

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

__all__ = ["MEMORY", "SweepRequest"]

MEMORY = 0.8  # of what is available, by default


@dataclass
class SweepRequest:
    """What to sweep, as `fusedops.sweep` describes it; batches and lengths are sorted here.

    Raises TypeError or ValueError for what cannot be swept. on_gpu: the model may be on one.
    """

    make_batch: Callable[[int, int | None], Any]
    model: nn.Module | None
    step: Callable[[Any], object] | None
    optimizer: torch.optim.Optimizer | None
    batches: Any
    lengths: Any
    mode: str
    variants: Sequence[str]
    budget_s: float
    memory_limit: float | int = MEMORY
    new_tokens: int = 32
    on_gpu: bool = False

    def __post_init__(self) -> None:
        if (self.model is None) == (self.step is None):
            got = "neither" if self.model is None else "both"
            raise ValueError(f"sweep: needs either model or step, got {got}")
        runs = {"step": a_function(self.step)} if self.model is None else {}
        check_types(
            "sweep",
            make_batch=a_function(self.make_batch, "a function of batch and length"),
            optimizer=an_optimizer(self.optimizer, optional=True),
            model=a_model(self.model, optional=True),
            **runs,
        )
        check_one_of("sweep", "mode", self.mode, MODES)
        if self.optimizer is not None and self.mode != "train":
            raise ValueError(
                f'sweep: optimizer must be None unless mode is "train", got mode {self.mode!r}'
            )
        check_positive("sweep", "budget_s", self.budget_s)
        check_whole("sweep", "new_tokens", self.new_tokens, 2)
        _check_limit(self.memory_limit)
        if not self.on_gpu:
            check_on_cpu("sweep", self.model)
        self.batches = _integers("batch", self.batches)
        self.lengths = (None,) if self.lengths is None else _integers("length", self.lengths)
        self.variants = _names(self.variants, self.mode, self.model)


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
