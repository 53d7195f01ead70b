"""Runs a call under torch's profiler and gives the life of each CPU allocation in it."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fusedops.profiling.storage.lives import ALWAYS, Life

__all__ = ["Marks", "has_storage", "profiled_lives"]

MARK = "fusedops::holds "


class Marks:
    """Notes in the profile that a tensor holds something.

    The trace knows allocations by their addresses, which are used again and again; a note's place
    in the trace tells which allocation it is about.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[int, int, str, str]] = []  # address, bytes, category, module

    def see(self, t: Tensor, category: str, module: str) -> None:
        if not has_storage(t):
            return
        with record_function(f"{MARK}{len(self.notes)}"):
            storage = t.untyped_storage()
            self.notes.append((storage.data_ptr(), storage.nbytes(), category, module))


def has_storage(t: Tensor) -> bool:
    """Whether a tensor has memory on the CPU."""
    dense = t.device.type == "cpu" and t.layout == torch.strided
    return dense and t.untyped_storage().nbytes() > 0


def profiled_lives(
    call: Callable[[Marks], object], before: Mapping[int, Life] | None = None
) -> list[Life]:
    """The life of each allocation in a call, and of those before it that are given or noted.

    before: known allocations by address. Memory that a library takes from the system directly is
    not seen by torch's profiler.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr when it starts
    marks = Marks()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call(marks)
    return list(_lives(_events(profiled), marks, dict(before or {})))


def _lives(events: Iterable[Any], marks: Marks, alive: dict[int, Life]) -> Iterator[Life]:
    yield from alive.values()
    for event in events:
        if event["name"].startswith(MARK):
            address, size, category, module = marks.notes[int(event["name"][len(MARK) :])]
            if address not in alive:  # allocated before the call
                alive[address] = Life(size, ALWAYS)
                yield alive[address]
            alive[address].hold(category, module)
            continue
        address, change = event["args"]["Addr"], event["args"]["Bytes"]
        if change > 0:
            alive[address] = Life(change, event["ts"])
            yield alive[address]
        elif address in alive:  # else allocated before the call, and unknown
            alive.pop(address).end = event["ts"]


def _events(profiled: profile) -> list[Any]:
    """The CPU's memory events and the notes in time order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = [event for event in events if _is_wanted(event)]
    return sorted(wanted, key=lambda event: event["ts"])


def _is_wanted(event: Any) -> bool:
    if event["name"] == "[memory]":
        return event["args"]["Device Type"] == 0
    return event["name"].startswith(MARK)
