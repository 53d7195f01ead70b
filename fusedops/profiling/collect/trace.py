"""Reads the GPU's work from a trace file that torch.profiler wrote (kineto's format).

To make one, use `profile(activities=[CPU, CUDA], schedule=..., with_stack=True)`, `step()` after
each step, and `export_chrome_trace`. The profiler slows the host down, so the share of launches
is an upper bound. `fusedops.profile` makes such a trace itself and corrects that: see collect/gpu.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fusedops.profiling.collect.gpu.allocator import Allocations
from fusedops.profiling.collect.kineto import (
    US,
    Enclosing,
    Event,
    Interval,
    is_work,
    length,
    outermost,
    read_events,
    spans,
    steps_of,
    union,
)
from fusedops.profiling.evidence import Copies, Evidence, Gpu, Run, Sync

__all__ = ["Wait", "Work", "gpu_of", "is_collective", "named", "read_trace", "work_of"]

SYNCS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
MALLOCS = ("cudaMalloc", "cuMemCreate")  # the second is of expandable segments
FETCH = "enumerate(DataLoader)#"  # begins the name of a DataLoader's `next`
COLLECTIVE = "nccl"  # in the names of collectives' kernels
USERS = re.compile(r"^(?!.*\btorch/).*\.py\(\d+\)")  # a function of the user's
TO_GPU = "Memcpy HtoD"  # begins the name of a copy to the GPU


@dataclass(frozen=True)
class Wait:
    """A wait of the host for the GPU: where, its seconds, and how long the GPU was idle after."""

    where: str
    seconds: float
    gap: float


@dataclass(frozen=True)
class Work:
    """What the GPU did in the traced steps. Seconds and counts are of a mean step.

    busy: in which something ran that is no collective. waits: those of each step but its last,
    which reads the loss or is the profiler's. last_waits: seconds of these.
    """

    steps: int
    seconds: float
    busy: float
    kernels: float
    median_kernel: float
    waits: tuple[tuple[Wait, ...], ...]
    last_waits: float
    exposed_communication: float
    mallocs: float
    malloc_seconds: float
    copies: Copies

    @property
    def waiting(self) -> float:
        """Seconds of the waits but the last."""
        return sum(wait.seconds for in_step in self.waits for wait in in_step) / self.steps


def read_trace(path: str | Path) -> Evidence:
    """The evidence of the trace's steps. Reads .json and .json.gz.

    Raises ValueError if the file is no such trace, or has no step or no work on a GPU.
    """
    events = read_events(path)
    steps = steps_of(events)
    if not steps:
        raise ValueError(f"profile: {path} has no ProfilerStep: give it a schedule, call step()")
    if not any(map(is_work, events)):
        raise ValueError(f"profile: {path} has no kernel of a GPU: record ProfilerActivity.CUDA")
    fetches = [
        e for e in events if e.name.startswith(FETCH) and e.category != "gpu_user_annotation"
    ]
    unseen = "input: the trace has no DataLoader, so idle time may be a wait for data"
    return Evidence(
        plain=Run(
            tuple((step.end - step.start) * US for step in steps),
            wait=_fetching(events, fetches, steps) if fetches else (),
        ),
        gpu=gpu_of(work_of(events)),
        device="cuda",
        about={"device": "a GPU, from a trace"},
        not_checked=(
            "input: a trace has no experiment" if fetches else unseen,
            "operators",
            "memory",
        ),
    )


def gpu_of(
    work: Work,
    plain: Run | None = None,
    allocated: Allocations | None = None,
    lines: Sequence[str] = (),
    slowed_by: tuple[str, ...] | None = None,
) -> Gpu:
    """What the GPU does in a step: a traced one, or one that is not traced.

    work: from traced steps. Tracing leaves kernel times unchanged but slows the host, so the GPU
    idles longer. plain: steps without a profiler. lines: of the waits in one step. slowed_by: None
    if it was not read.
    """
    step = median(plain.seconds) if plain else work.seconds
    idle = _shrunk(step - work.busy, work.seconds - work.busy)
    synced = median(plain.synced) if plain and plain.synced else work.last_waits
    waits = [
        [Wait(w.where, w.seconds, idle * w.gap) for w in in_step]
        for in_step in named(work.waits, lines)
    ]
    return Gpu(
        busy=min(1.0, work.busy / step),
        host_waits=min(1.0, (synced + work.waiting) / step),
        kernels=round(work.kernels),
        median_kernel=work.median_kernel,
        syncs=_syncs(waits),
        exposed_communication=work.exposed_communication,
        alloc_retries=allocated.retries if allocated else 0,
        mallocs=allocated.mallocs if allocated else work.mallocs,
        malloc_seconds=work.malloc_seconds,
        slowed_by=slowed_by or (),
        copies=work.copies,
        reserved=allocated.reserved if allocated else None,
    )


def _shrunk(plain: float, traced: float) -> float:
    """Idle time without the profiler over idle time with it, at most 1."""
    return min(1.0, max(0.0, plain) / traced) if traced > 0 else 1.0


def named(waits: Sequence[Sequence[Wait]], lines: Sequence[str]) -> list[list[Wait]]:
    """The waits of each step with their lines of code, where a step has as many as there are lines.

    In others, such as steps that call `torch.cuda.synchronize`, the waits keep their operators.
    """
    return [
        [Wait(line, w.seconds, w.gap) for w, line in zip(in_step, lines, strict=True)]
        if len(in_step) == len(lines)
        else list(in_step)
        for in_step in waits
    ]


def work_of(events: Sequence[Event]) -> Work:
    """The GPU's work from the first step's start to the last one's end; there must be a step."""
    steps = steps_of(events)
    window = steps[0].start, max(step.end for step in steps)
    inside = [e for e in events if e.end > window[0] and e.start < window[1]]
    count = len(steps)
    work = [e for e in inside if is_work(e)]
    kernels = [e for e in work if e.category == "kernel"]
    others = spans(e for e in work if not is_collective(e))
    collectives = spans(e for e in kernels if is_collective(e))
    mallocs = [e for e in inside if e.name in MALLOCS]
    waits = _waits(inside, steps, spans(work))
    return Work(
        steps=count,
        seconds=(window[1] - window[0]) * US / count,
        busy=length(others, window) * US / count,
        kernels=len(kernels) / count,
        median_kernel=median(e.end - e.start for e in kernels) * US if kernels else 0.0,
        waits=tuple(tuple(in_step[:-1]) for in_step in waits),
        last_waits=sum(in_step[-1].seconds for in_step in waits if in_step) / count,
        exposed_communication=_uncovered(collectives, others, window) * US / count,
        mallocs=len(mallocs) / count,
        malloc_seconds=sum(e.end - e.start for e in mallocs) * US / count,
        copies=_copies([e for e in work if e.name.startswith(TO_GPU)], work, window, count),
    )


def is_collective(kernel: Event) -> bool:
    return COLLECTIVE in kernel.name.lower()


def _syncs(waits: Sequence[Sequence[Wait]]) -> tuple[Sync, ...]:
    """The waits of all steps by place, with the idle time after each, a step."""
    gaps: dict[str, float] = {}
    for wait in (wait for in_step in waits for wait in in_step):
        gaps[wait.where] = gaps.get(wait.where, 0.0) + wait.gap / len(waits)
    return tuple(sorted((Sync(*item) for item in gaps.items()), key=lambda sync: -sync.gap))


def _copies(to_gpu: Sequence[Event], work: Sequence[Event], window: Interval, steps: int) -> Copies:
    """A step's copies to the GPU, by whether the host's memory is pinned."""
    sizes = {True: 0, False: 0}
    for copy in to_gpu:
        sizes["Pinned" in copy.name] += int(copy.args.get("bytes", 0))
    rest = spans(e for e in work if not e.name.startswith(TO_GPU))
    return Copies(
        pinned=round(sizes[True] / steps),
        pageable=round(sizes[False] / steps),
        exposed=_uncovered(spans(to_gpu), rest, window) * US / steps,
    )


def _uncovered(
    collectives: Sequence[Interval], others: Sequence[Interval], window: Interval
) -> float:
    """How long the collectives ran and none of the others."""
    return length(union([*collectives, *others]), window) - length(others, window)


def _fetching(
    events: Iterable[Event], fetches: Iterable[Event], steps: Sequence[Event]
) -> tuple[float, ...]:
    """Seconds of each step in which a DataLoader's batch was fetched and the GPU was idle."""
    fetched, work = spans(fetches), spans(e for e in events if is_work(e))
    return tuple(_uncovered(fetched, work, (step.start, step.end)) * US for step in steps)


def _waits(
    events: Sequence[Event], steps: Sequence[Event], busy: Sequence[Interval]
) -> list[list[Wait]]:
    """The host's waits in each step, in order."""
    places, ends = _Places(events), [end for _, end in busy]
    syncs = sorted((e for e in events if e.name in SYNCS), key=lambda e: e.start)
    waits = []
    for step in steps:
        in_step = [e for e in syncs if step.start <= e.start < step.end]
        idle = [_idle_after(busy, ends, e.end, step.end) for e in in_step]
        waits.append(
            [
                Wait(places.of(e), (e.end - e.start) * US, gap * US)
                for e, gap in zip(in_step, idle, strict=True)
            ]
        )
    return waits


def _idle_after(
    busy: Sequence[Interval], ends: Sequence[float], time: float, latest: float
) -> float:
    """How long nothing ran from a time on."""
    after = bisect_right(ends, time)
    start = busy[after][0] if after < len(busy) else latest
    return max(0.0, min(start, latest) - time)


class _Places:
    """Where in the program an event of the host is."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._operators = Enclosing(outermost(e for e in events if e.category == "cpu_op"))
        self._python = [e for e in events if e.category == "python_function"]
        self._python = [e for e in self._python if USERS.search(e.name)]

    def of(self, wait: Event) -> str:
        """The user's innermost function around it, else the outermost operator."""
        around = [e for e in self._python if e.start <= wait.start and e.end >= wait.end]
        if around:
            return max(around, key=lambda e: e.start).name
        operator = self._operators.at(wait)
        return operator.name if operator else wait.name
