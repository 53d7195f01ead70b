"""Runs a call under torch.profiler, and returns the lifetime of each allocation."""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fusedops.measuring.memory.allocations import ALWAYS, Allocation

__all__ = ["Marks", "allocations_of", "has_storage", "profiled_allocations"]

MARK = "fusedops::holds "
CPU = torch.device("cpu")
KINDS = {"cpu": 0, "cuda": 1}  # in a trace


class Marks:
    """Notes in the profile that a tensor holds something.

    The trace knows allocations by their addresses, which are used again and again; a note's place
    in the trace tells which allocation it is about.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self.notes: list[tuple[int, int, str, str]] = []  # address, bytes, category, module

    def see(self, t: Tensor, category: str, module: str) -> None:
        if has_storage(t, self.device):
            storage = t.untyped_storage()
            with record_function(f"{MARK}{len(self.notes)}"):
                self.notes.append((storage.data_ptr(), storage.nbytes(), category, module))


def has_storage(t: Tensor, device: torch.device = CPU) -> bool:
    """Whether a tensor has memory on a device."""
    dense = t.device == device and t.layout == torch.strided
    return dense and t.untyped_storage().nbytes() > 0


def profiled_allocations(
    call: Callable[[Marks], object],
    before: Mapping[int, Allocation] | None = None,
    marks: Marks | None = None,
) -> list[Allocation]:
    """Each allocation in a call, and of those before it that are given or noted.

    before: known allocations by address. marks: of the device, for the call. Memory that a library
    takes from the system, or from the driver, is not seen by torch's profiler. A GPU's allocations
    are those of torch's allocator.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr when it starts
    marks = marks or Marks()
    _hide_the_first_warning()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call(marks)
    return list(allocations_of(_events(profiled), marks, dict(before or {})))


@functools.cache
def _hide_the_first_warning() -> None:
    """Frees an older block under the profiler, while nobody reads the process's standard error.

    torch writes once in a process that it does not know the size of such a block; `before` and the
    notes do.
    """
    blocks = [torch.empty(1, dtype=torch.uint8, device="cpu")]
    with suppress(OSError), ExitStack() as undo:  # no standard error
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        undo.callback(os.close, kept)
        undo.callback(os.close, nowhere)
        os.dup2(nowhere, 2)
        undo.callback(os.dup2, kept, 2)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            blocks.clear()


def allocations_of(
    events: Iterable[Any], marks: Marks, alive: dict[int, Allocation]
) -> Iterator[Allocation]:
    """Each allocation on the marks' device, from a trace's events in time order."""
    kind, index = KINDS[marks.device.type], marks.device.index
    yield from alive.values()
    for event in events:
        if event["name"].startswith(MARK):
            address, size, category, module = marks.notes[int(event["name"][len(MARK) :])]
            if address not in alive:  # allocated before the call
                alive[address] = Allocation(size, ALWAYS)
                yield alive[address]
            alive[address].hold(category, module)
            continue
        about = event["args"]
        if about["Device Type"] != kind or index not in (None, about["Device Id"]):
            continue
        address, change = about["Addr"], about["Bytes"]
        if change > 0:
            alive[address] = Allocation(change, event["ts"])
            yield alive[address]
        elif address in alive:  # else allocated before the call, and unknown
            alive.pop(address).end = event["ts"]


def _events(profiled: profile) -> list[Any]:
    """The memory events and the notes in time order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory_events = [event for event in events if _is_wanted(event)]
    return sorted(memory_events, key=lambda event: event["ts"])


def _is_wanted(event: Any) -> bool:
    return event["name"] == "[memory]" or event["name"].startswith(MARK)
