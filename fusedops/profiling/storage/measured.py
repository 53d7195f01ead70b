"""Measures what a live step's memory holds, to the byte."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedops.profiling.storage.lives import (
    CATEGORIES,
    TEMPORARIES,
    Life,
    by_module,
    held_at,
    largest,
    peak_of,
)
from fusedops.profiling.storage.profiled import Marks, has_storage, profiled_lives
from fusedops.profiling.storage.use import MemoryUse
from fusedops.profiling.storage.watch import Watch, local, static_tensors

__all__ = ["measure_memory"]


def measure_memory(
    step: Callable[[], object],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryUse:
    """Runs `step()` once on the CPU and says what its memory held.

    step: one training or inference step, run as it is; whatever it changes stays changed. The first
    step of an optimizer makes its state, so measure a later one. model: gives parameters, buffers,
    gradients, activations by module, logits and the KV cache; without it these count as
    temporaries, but for what the optimizer holds. torch.profiler sees each allocation, those inside
    operators too; a module's and autograd's hooks say what it holds.

    Raises TypeError for an argument of another type, and RuntimeError for a model that is not on
    the CPU.
    """
    _check(step, model, optimizer)
    before: dict[int, Life] = {}
    for t, category, module in static_tensors(model, optimizer):
        if has_storage(t):
            storage = t.untyped_storage()
            before.setdefault(storage.data_ptr(), Life(storage.nbytes())).hold(category, module)
    frozen = _frozen(model)

    def watched(marks: Marks) -> None:
        with nullcontext() if model is None else Watch(model, marks.see):
            step()
        for t, category, module in static_tensors(model, optimizer):
            marks.see(t, category, module)

    return _use(profiled_lives(watched, before), frozen)


def _check(step: object, model: object, optimizer: object) -> None:
    wanted = {
        "step": (step, callable(step), "a function without arguments"),
        "model": (model, isinstance(model, nn.Module | None), "a torch.nn.Module or None"),
        "optimizer": (
            optimizer,
            isinstance(optimizer, torch.optim.Optimizer | None),
            "a torch.optim.Optimizer or None",
        ),
    }
    for name, (value, fits, what) in wanted.items():
        if not fits:
            got = type(value).__name__
            raise TypeError(f"measure_memory: {name} must be {what}, got {got}")
    for t, category, module in static_tensors(model, optimizer):  # type: ignore[arg-type]
        if t.device.type != "cpu":
            where = f"{category} of {module or 'the model'} on {t.device}"
            raise RuntimeError(f"measure_memory: model must be on the CPU, got {where}")


def _frozen(model: nn.Module | None) -> int:
    """Bytes of the storages that only parameters without gradients use."""
    parameters = [] if model is None else [*model.parameters()]
    trained, fixed = (
        {
            storage.data_ptr(): storage.nbytes()
            for storage in (local(p).untyped_storage() for p in parameters if p.requires_grad is on)
        }
        for on in (True, False)
    )
    return sum(size for address, size in fixed.items() if address not in trained)


def _use(lives: list[Life], frozen: int) -> MemoryUse:
    time, peak = peak_of(lives)
    at_peak = held_at(lives, time)
    remains = sum(life.bytes for life in lives if life.end == math.inf)
    most: dict[str, Any] = {n: largest(lives, n) for n in CATEGORIES if n != TEMPORARIES}
    return MemoryUse(
        **most,
        frozen=frozen,
        temporaries=at_peak[TEMPORARIES],
        peak=peak,
        slack=_resident() - remains,
        at_peak=at_peak,
        modules=by_module(lives),
    )


def _resident() -> int:
    """This process's resident bytes, from the kernel."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
