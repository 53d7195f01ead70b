"""Predicts what a process holds in addition to tensors: libraries and gaps."""

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from torch import Tensor, nn

from fusedops.measuring.memory.allocations import ALWAYS
from fusedops.measuring.memory.profiled import has_storage
from fusedops.measuring.memory.watch import local, static_tensors
from fusedops.profiling.planning.heap import Event, heap_peak
from fusedops.profiling.planning.optimizers import ParameterStep
from fusedops.profiling.planning.step import FakeStep

__all__ = ["heap_bytes", "library_bytes", "resident"]

FIRST_STEP = 24 << 20  # code and tables that the first steps load, and small objects


def library_bytes(model: object) -> int | None:
    """What this process holds without the model's tensors, and what a first step adds.

    None if the kernel does not tell, or the tensors are not all in memory, such as mapped files.
    """
    resident_bytes = resident()
    if resident_bytes is None:
        return None
    tensors: list[Tensor] = []
    if isinstance(model, nn.Module):
        tensors += [t for t, _, _ in static_tensors(model, None)]
        tensors += [local(p.grad) for p in model.parameters() if p.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if has_storage(t)}
    others = resident_bytes - sum(t.untyped_storage().nbytes() for t in storages.values())
    return others + FIRST_STEP if others > 0 else None


def resident() -> int | None:
    """This process's resident bytes, from the kernel; None if it does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def heap_bytes(run: FakeStep, optimizer: Sequence[ParameterStep]) -> int | None:
    """The most bytes that malloc holds while a process repeats a step, as `heap_peak` says.

    optimizer: its step, of each parameter.
    """
    before: list[int] = []
    times: list[tuple[float, Event]] = []
    numbers = count(1)
    for allocation in run.allocations:
        if allocation.start == ALWAYS:
            before.append(allocation.bytes)
        elif allocation.bytes:
            block = next(numbers)
            times.append((allocation.start, (block, allocation.bytes)))
            times.append((allocation.end, (block, 0)))
    last = 0
    for size in (size for part in optimizer for size in part.blocks):
        block = next(numbers)
        times += [(run.step, (block, size)), (run.step, (last, 0))]  # the one before is freed
        last = block
    times.sort(key=lambda timed: timed[0])
    step = [event for _, event in times]
    backward, update = (sum(time < at for time, _ in times) for at in (run.backward, run.step))
    state = [size for part in optimizer for size in part.state]
    return heap_peak(before, step, state, backward, update)
