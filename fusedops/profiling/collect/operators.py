"""Makes the table of a step's operators: calls, FLOPs, bytes and seconds of each."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusedops.measuring.clock import preempted_seconds
from fusedops.profiling.collect.arithmetic import Arithmetic, dtype_of
from fusedops.profiling.collect.modules import Modules
from fusedops.profiling.collect.traffic import Reuse, touched, traffic
from fusedops.profiling.evidence import Op, Profiled

__all__ = ["Recorder", "Times", "assign", "flops_of", "record", "rows", "table"]

LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")  # a layer's number in a module's name
STEPS, FEWEST, MOST = 5, 3, 15  # steps that are kept, needed, and tried under torch.profiler
QUIET = 0.03  # a step that other programs held up for a smaller share of its time is undisturbed
LONGEST = 96  # characters of an operator's shapes


Times = dict[str, list[tuple[float, int]]]  # operator -> seconds and events of each call


class Key(NamedTuple):
    """Calls with the same key are one row."""

    name: str
    shapes: str
    dtype: str
    module: str


@dataclass
class Row:
    calls: int = 0
    flops: int = 0
    traffic: Counter[int] = field(default_factory=Counter)  # power of two -> bytes
    events: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, distance: int, size: int) -> None:
        self.traffic[1 << (distance - 1).bit_length()] += size


class Recorder(Arithmetic):
    """Records every operator below autograd that runs while it is entered."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self.modules = modules
        self.rows: dict[Key, Row] = defaultdict(Row)
        self.sequence: dict[str, list[Key]] = defaultdict(list)  # operator -> keys of its calls
        self.reuse = Reuse()

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, flops: int) -> None:
        name, dtype = func._schema.name, dtype_of(args, kwargs)
        module = LAYER.sub("*", self.modules.current())  # layers are one row
        key = Key(name, _shapes(args, kwargs), dtype, module)
        row = self.rows[key]
        row.calls += 1
        row.flops += flops
        self.sequence[name].append(key)
        differs = traffic(func, args, kwargs)
        self.reuse.touch(touched(func, args, kwargs, out, differs.unread), row.add)
        for distance, size in differs.again:
            row.add(max(1, distance), size)


def _shapes(args: tuple, kwargs: dict[str, Any]) -> str:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    shapes = " ".join(str(list(t.shape)) + _layout(t) for t in tensors)
    return shapes if len(shapes) <= LONGEST else shapes[: LONGEST - 3] + "..."


def _layout(tensor: Tensor) -> str:
    """A remark on a tensor whose elements do not lie in order."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ""
    return "T" if tensor.dim() >= 2 and tensor.mT.is_contiguous() else "strided"


def record(call: Callable[[], Any]) -> Recorder:
    """Runs one step and records its operators."""
    with Modules() as modules, Recorder(modules) as recorder:
        call()
    recorder.reuse.finish()
    return recorder


def flops_of(profiled: Profiled | None) -> dict[str, int] | None:
    """Arithmetic of a step by dtype."""
    if profiled is None:
        return None
    sums: Counter[str] = Counter()
    for op in profiled.ops:
        sums[op.dtype] += op.flops
    return dict(+sums)


def table(call: Callable[[], Any], deadline: float, on_step: Callable[[], None]) -> Profiled:
    """Runs one recorded step, and steps under torch.profiler; the least disturbed ones count.

    call: one step. deadline: a `perf_counter` time. Times are the profiler's; `judge` takes its
    overhead off.
    """
    recorder = record(call)
    on_step()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr when it starts
    _profiled(call)  # the first start of the profiler is slow
    walls, events, delays, disturbed = [], [], [], []
    for done in range(1, MOST + 1):
        wall, trace, preempted = _profiled(call)
        walls.append(wall)
        assign(recorder, _times(recorder, trace))
        events.append(len(trace))
        delays.append(preempted)
        disturbed.append(preempted / wall)
        on_step()
        if done >= STEPS and sorted(disturbed)[STEPS - 1] < QUIET:
            break
        if done >= FEWEST and perf_counter() + 2 * wall > deadline:
            break
    kept = sorted(sorted(range(len(walls)), key=disturbed.__getitem__)[:STEPS])
    ops = rows(recorder, kept, len(walls))
    walls, delays = ([values[i] for i in kept] for values in (walls, delays))
    return Profiled(tuple(walls), max(events), ops, tuple(delays))


def rows(recorder: Recorder, kept: Sequence[int], steps: int) -> tuple[Op, ...]:
    """Makes the table from `steps` profiled steps. Only the kept steps' times count."""
    return tuple(
        Op(
            *key,
            calls=row.calls,
            flops=row.flops,
            traffic=tuple(sorted(row.traffic.items())),
            seconds=tuple(row.seconds[i] for i in kept),
            events=round(row.events / steps),
        )
        for key, row in recorder.rows.items()
    )


def _profiled(call: Callable[[], Any]) -> tuple[float, Sequence[Any], float]:
    """Wall seconds of a step under torch.profiler, its events, and seconds of preemption."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu]) as profile:
        delayed, start = preempted_seconds(), perf_counter()
        call()
        wall, delay = perf_counter() - start, preempted_seconds() - delayed
    return wall, profile.events(), delay


def _times(recorder: Recorder, events: Sequence[Any]) -> Times:
    times: Times = defaultdict(list)
    tops = sorted((e for e in events if e.cpu_parent is None), key=lambda e: e.time_range.start)
    for event in tops:
        for name, seconds, inside in _matches(event, recorder.sequence):
            times[name].append((seconds, inside))
    return times


def assign(recorder: Recorder, times_by_name: Times) -> None:
    """Adds a profiled step's times to the rows.

    The n-th event of an operator is its n-th recorded call. If their numbers differ, because the
    steps differ, each of the operator's calls gets the mean.
    """
    sums: dict[Key, float] = defaultdict(float)
    for name, keys in recorder.sequence.items():
        times = times_by_name.get(name, [])
        if len(times) != len(keys):
            mean = sum(t for t, _ in times) / len(keys)
            times = [(mean, sum(n for _, n in times) // len(keys))] * len(keys)
        for key, (seconds, below) in zip(keys, times, strict=True):
            sums[key] += seconds
            recorder.rows[key].events += below
    for key, row in recorder.rows.items():
        row.seconds.append(sums[key])


def _matches(event: Any, names: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Events of recorded operators below an event: name, seconds, and events inside of each."""
    if event.name in names:
        yield event.name, event.cpu_time_total / 1e6, _count(event)
        return
    for child in sorted(event.cpu_children, key=lambda e: e.time_range.start):
        yield from _matches(child, names)


def _count(event: Any) -> int:
    return 1 + sum(map(_count, event.cpu_children))
