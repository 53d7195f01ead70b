"""Reads a kineto trace's events, and matches calls with their kernels.

Times are microseconds, as in the file. A kernel's event has the correlation of the runtime call
that launched it; that call's time and thread say which operator it belongs to.
"""

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "US",
    "Enclosing",
    "Event",
    "Interval",
    "Launches",
    "is_work",
    "length",
    "outermost",
    "read_events",
    "spans",
    "steps_of",
    "union",
]

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
STEP = "ProfilerStep#"
US = 1e-6

Interval = tuple[float, float]


class Event(NamedTuple):
    """A part of a trace, in microseconds. thread: the host's thread, or a stream of the GPU."""

    name: str
    category: str
    start: float
    end: float
    thread: Any
    args: dict[str, Any]


def read_events(path: str | Path) -> list[Event]:
    """The events that have a length, of .json or .json.gz. Raises ValueError for other files."""
    path = Path(path)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return [
            _event(event) for event in json.loads(content)["traceEvents"] if event.get("ph") == "X"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"profile: {path} must be a trace of torch.profiler") from error


def _event(values: dict[str, Any]) -> Event:
    start, lasts = float(values["ts"]), float(values.get("dur", 0.0))
    category, thread = values.get("cat", ""), (values.get("pid"), values.get("tid"))
    return Event(values["name"], category, start, start + lasts, thread, values.get("args") or {})


def is_work(event: Event) -> bool:
    """Whether the GPU computed or copied."""
    return event.category in ON_GPU


def steps_of(events: Iterable[Event]) -> list[Event]:
    """The profiler's steps on the host, in order."""
    on_host = (e for e in events if e.name.startswith(STEP) and not e.category.startswith("gpu_"))
    return sorted(on_host, key=lambda step: step.start)


class Launches:
    """Which of the host's events launched which work of the GPU."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._calls = {
            e.args["correlation"]: e
            for e in events
            if e.category in RUNTIME and "correlation" in e.args
        }

    def of(self, work: Event) -> Event | None:
        """The runtime call that launched it; None if that was before the trace."""
        return self._calls.get(work.args.get("correlation"))


class Enclosing:
    """Finds which of several events of the host, none inside another, ran at a time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._of: dict[Any, list[Event]] = defaultdict(list)
        for event in sorted(events, key=lambda e: e.start):
            self._of[event.thread].append(event)
        self._starts = {
            thread: [e.start for e in same_thread] for thread, same_thread in self._of.items()
        }

    def at(self, inside: Event) -> Event | None:
        """The event of the same thread within which an event starts."""
        index = bisect_right(self._starts.get(inside.thread, []), inside.start) - 1
        if index < 0:
            return None
        event = self._of[inside.thread][index]
        return event if inside.start <= event.end else None


def outermost(events: Iterable[Event]) -> list[Event]:
    """The events that lie in no other one of the same thread, in order."""
    kept: list[Event] = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        if event.start >= ends.get(event.thread, float("-inf")):
            kept.append(event)
            ends[event.thread] = event.end
    return kept


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def spans(events: Iterable[Event]) -> list[Interval]:
    """When any of the events ran."""
    return union((e.start, e.end) for e in events)


def length(intervals: Sequence[Interval], window: Interval) -> float:
    """How long disjoint intervals are inside a window."""
    low, high = window
    return sum(max(0.0, min(end, high) - max(start, low)) for start, end in intervals)
