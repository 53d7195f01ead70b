"""The most memory that a call holds beyond what there was before it."""

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
    """Bytes of the peak, and of the results, which stay and are in it."""

    peak: int
    results: int

    @property
    def beside(self) -> int:
        """The peak without the results."""
        return self.peak - self.results


def profiled(call: Callable[[], object]) -> Memory:
    """Of a call on a CPU: the running sum of what torch's profiler sees allocated and freed.

    What a library takes from the system itself is not seen.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it says on stderr when it starts
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        results = call()
    return Memory(max(accumulate(_changes(profile), initial=0)), nbytes(results))


def nbytes(results: object) -> int:
    tensors = [results] if isinstance(results, Tensor) else results
    assert isinstance(tensors, (list, tuple))
    return sum(t.nbytes for t in tensors)


def _changes(profile: torch.profiler.profile) -> Iterator[int]:
    """Bytes allocated, or freed and then negative, in the order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    return (event["args"]["Bytes"] for event in sorted(changes, key=lambda event: event["ts"]))
