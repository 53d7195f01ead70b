"""Measures a call's peak memory, without what was allocated before."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """Bytes at the peak, and bytes of the results, which are included and remain."""

    peak: int
    results: int

    @property
    def beside(self) -> int:
        """The peak without the results."""
        return self.peak - self.results


def profiled(call: Callable[[], object]) -> Memory:
    """A CPU call's peak: the running sum of allocations that torch's profiler sees.

    Memory that a library takes from the system directly is not included.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr when it starts
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        results = call()
    return Memory(max(accumulate(_changes(profile), initial=0)), nbytes(results))


def nbytes(results: object) -> int:
    tensors = [results] if isinstance(results, Tensor) else results
    assert isinstance(tensors, (list, tuple))
    return sum(t.nbytes for t in tensors)


def _changes(profile: torch.profiler.profile) -> Iterator[int]:
    """Bytes allocated, or freed and then negative, in time order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    return (event["args"]["Bytes"] for event in sorted(changes, key=lambda event: event["ts"]))
