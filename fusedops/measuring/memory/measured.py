"""Runs a step once and measures its memory by category, on the CPU or a GPU."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedops.measuring.arguments import a_function, a_model, an_optimizer, check_types
from fusedops.measuring.driver import Driver
from fusedops.measuring.memory.allocations import (
    CATEGORIES,
    TEMPORARIES,
    Allocation,
    by_module,
    held_at,
    largest,
    peak_of,
)
from fusedops.measuring.memory.memory_use import MemoryUse
from fusedops.measuring.memory.profiled import Marks, has_storage, profiled_allocations
from fusedops.measuring.memory.watch import AllocationWatch, local, static_tensors

__all__ = ["measure_memory"]


def measure_memory(
    step: Callable[[], object],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    driver: Driver | None = None,
) -> MemoryUse:
    """Runs `step()` once and says what its memory held, on the CPU or on one GPU.

    step: one training or inference step, run as it is; whatever it changes stays changed. The first
    step of an optimizer makes its state, so measure a later one. model: gives parameters, buffers,
    gradients, activations by module, logits and the KV cache; without it these count as
    temporaries, but for what the optimizer holds. torch.profiler sees each allocation, those inside
    operators too; a module's and autograd's hooks say what it holds. driver: of the GPU; its slack
    is what the caching allocator has reserved and no tensor uses.

    Raises TypeError for an argument of another type, and RuntimeError for a model that is not on
    the device.
    """
    device = torch.device("cpu") if driver is None else driver.device
    _check(step, model, optimizer, device)
    frozen = _frozen(model)
    allocations = _allocations(step, model, optimizer, device)
    remains = sum(allocation.bytes for allocation in allocations if allocation.end == math.inf)
    return _use(allocations, frozen, _resident() - remains if driver is None else _unused(driver))


def _allocations(
    step: Callable[[], object],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> list[Allocation]:
    """Each allocation in one step, with what it holds."""
    before: dict[int, Allocation] = {}
    for t, category, module in static_tensors(model, optimizer):
        if has_storage(t, device):
            storage = t.untyped_storage()
            allocation = before.setdefault(storage.data_ptr(), Allocation(storage.nbytes()))
            allocation.hold(category, module)

    def watched(marks: Marks) -> None:
        with nullcontext() if model is None else AllocationWatch(model, marks.see):
            step()
        for t, category, module in static_tensors(model, optimizer):
            marks.see(t, category, module)

    return profiled_allocations(watched, before, Marks(device))


def _unused(driver: Driver) -> int:
    stats = driver.stats()
    return stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]


def _check(step: object, model: object, optimizer: object, device: torch.device) -> None:
    check_types(
        "measure_memory",
        step=a_function(step, "a function without arguments"),
        model=a_model(model, optional=True),
        optimizer=an_optimizer(optimizer, optional=True),
    )
    for t, category, module in static_tensors(model, optimizer):  # type: ignore[arg-type]
        if t.device not in (device, torch.device("cpu")):  # a GPU's optimizer counts on the CPU
            place = "the CPU" if device.type == "cpu" else str(device)
            where = f"{category} of {module or 'the model'} on {t.device}"
            raise RuntimeError(f"measure_memory: model must be on {place}, got {where}")


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


def _use(allocations: list[Allocation], frozen: int, slack: int) -> MemoryUse:
    time, peak = peak_of(allocations)
    at_peak = held_at(allocations, time)
    peaks: dict[str, Any] = {n: largest(allocations, n) for n in CATEGORIES if n != TEMPORARIES}
    return MemoryUse(
        **peaks,
        frozen=frozen,
        temporaries=at_peak[TEMPORARIES],
        peak=peak,
        slack=slack,
        at_peak=at_peak,
        modules=by_module(allocations),
    )


def _resident() -> int:
    """This process's resident bytes, from the kernel."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
