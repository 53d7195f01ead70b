"""Evidence of a GPU's work from a trace that torch.profiler wrote (kineto's format).

Made with `profile(activities=[CPU, CUDA], schedule=..., with_stack=True)`, `step()` after each
training step, and `export_chrome_trace`. Times in a trace are microseconds. The profiler slows the
host down, so the share of launches is an upper bound.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fusedops.profiling.evidence import Evidence, Gpu, Run, Sync

__all__ = ["read_trace"]

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SYNCS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
FETCH = "enumerate(DataLoader)#"  # begins the name of a DataLoader's `next`
COLLECTIVE = "nccl"  # in the names of collectives' kernels
US = 1e-6

Interval = tuple[float, float]


class Event(NamedTuple):
    name: str
    category: str
    start: float
    end: float


def read_trace(path: str | Path) -> Evidence:
    """The evidence of the trace's steps. Reads .json and .json.gz.

    Raises ValueError if the file is no such trace, or has no step or no work on a GPU.
    """
    path = Path(path)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        events = [_event(one) for one in json.loads(content)["traceEvents"] if one.get("ph") == "X"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"profile: {path} must be a trace of torch.profiler") from error
    steps = sorted(e for e in events if e.name.startswith("ProfilerStep#") and _on_host(e))
    if not steps:
        raise ValueError(f"profile: {path} has no ProfilerStep: give it a schedule, call step()")
    if not any(e.category in ON_GPU for e in events):
        raise ValueError(f"profile: {path} has no kernel of a GPU: record ProfilerActivity.CUDA")
    steps.sort(key=lambda step: step.start)
    window = steps[0].start, max(step.end for step in steps)
    inside = [e for e in events if e.end > window[0] and e.start < window[1]]
    fetches = [e for e in inside if e.name.startswith(FETCH) and _on_host(e)]
    unseen = "input: the trace has no DataLoader, so idle time may be a wait for data"
    return Evidence(
        plain=Run(
            tuple((step.end - step.start) * US for step in steps),
            wait=_waits(inside, fetches, steps) if fetches else (),
        ),
        gpu=_gpu(inside, steps, window),
        device="cuda",
        about={"device": "a GPU, from a trace"},
        not_checked=(
            "input: a trace has no experiment" if fetches else unseen,
            "operators",
            "memory",
        ),
    )


def _event(one: dict[str, Any]) -> Event:
    start = float(one["ts"])
    return Event(one["name"], one.get("cat", ""), start, start + float(one.get("dur", 0.0)))


def _on_host(event: Event) -> bool:
    return not event.category.startswith("gpu_")


def _gpu(events: Sequence[Event], steps: Sequence[Event], window: Interval) -> Gpu:
    length = window[1] - window[0]
    work = [e for e in events if e.category in ON_GPU]
    kernels = [e for e in work if e.category == "kernel"]
    busy = _union((e.start, e.end) for e in work)
    collectives = _union((e.start, e.end) for e in kernels if COLLECTIVE in e.name.lower())
    others = _union((e.start, e.end) for e in work if COLLECTIVE not in e.name.lower())
    waits = [e for e in events if e.name in SYNCS]
    mallocs = [e for e in events if e.name == "cudaMalloc"]
    count = len(steps)
    return Gpu(
        busy=_length(others, window) / length,
        host_waits=_length(_union((e.start, e.end) for e in waits), window) / length,
        kernels=round(len(kernels) / count),
        median_kernel=median(e.end - e.start for e in kernels) * US if kernels else 0.0,
        syncs=_syncs(events, waits, busy, steps),
        exposed_communication=(
            _length(_union([*collectives, *others]), window) - _length(others, window)
        )
        * US
        / count,
        mallocs=round(len(mallocs) / count),
        malloc_seconds=sum(e.end - e.start for e in mallocs) * US / count,
    )


def _waits(
    events: Sequence[Event], fetches: Sequence[Event], steps: Sequence[Event]
) -> tuple[float, ...]:
    """Seconds of each step in which a DataLoader's batch was fetched and the GPU was idle."""
    work = _union((e.start, e.end) for e in events if e.category in ON_GPU)
    either = _union([*work, *((e.start, e.end) for e in fetches)])
    windows = [(step.start, step.end) for step in steps]
    return tuple((_length(either, w) - _length(work, w)) * US for w in windows)


def _syncs(
    events: Sequence[Event],
    waits: Sequence[Event],
    busy: Sequence[Interval],
    steps: Sequence[Event],
) -> tuple[Sync, ...]:
    """The waits by place, with the idle time of the GPU after each, a step.

    The last wait of each step reads the loss, or is the profiler's, and does not count.
    """
    gaps: dict[str, float] = {}
    for step in steps:
        own = sorted((e for e in waits if step.start <= e.start < step.end), key=lambda e: e.start)
        for wait in own[:-1]:
            place = _place(events, wait)
            gaps[place] = gaps.get(place, 0.0) + _idle_after(busy, wait.end, step.end)
    found = [Sync(place, gap * US / len(steps)) for place, gap in gaps.items()]
    return tuple(sorted(found, key=lambda sync: -sync.gap))


def _idle_after(busy: Sequence[Interval], time: float, latest: float) -> float:
    """How long nothing ran from a time on."""
    for start, end in busy:
        if end > time:
            return max(0.0, min(start, latest) - time)
    return max(0.0, latest - time)


def _place(events: Iterable[Event], wait: Event) -> str:
    """The innermost Python function around an event, else the outermost operator."""
    around = [e for e in events if e.start <= wait.start and e.end >= wait.end and e is not wait]
    python = [e for e in around if e.category == "python_function" and "torch/" not in e.name]
    if python:
        return max(python, key=lambda e: e.start).name
    operators = [e for e in around if e.category == "cpu_op"]
    return min(operators, key=lambda e: e.start).name if operators else wait.name


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval], window: Interval) -> float:
    low, high = window
    return sum(max(0.0, min(end, high) - max(start, low)) for start, end in intervals)
