"""Makes a GPU's table of operators, with their kernels' time in each step."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from fusedops.profiling.collect.kineto import (
    US,
    Enclosing,
    Event,
    Launches,
    is_work,
    outermost,
    steps_of,
)
from fusedops.profiling.collect.operators import Recorder, Times, assign, rows
from fusedops.profiling.collect.trace import is_collective
from fusedops.profiling.evidence import Profiled

__all__ = ["device_table", "device_times"]


def device_table(recorder: Recorder, events: Sequence[Event]) -> Profiled:
    """The recorded operators with their kernels' time in each step of a trace."""
    times_by_step = device_times(events, recorder.sequence)
    for times in times_by_step:
        assign(recorder, times)
    steps = steps_of(events)
    seconds = tuple((step.end - step.start) * US for step in steps)
    return Profiled(seconds, 0, rows(recorder, range(len(steps)), len(steps)))


def device_times(events: Sequence[Event], names: Iterable[str]) -> list[Times]:
    """For each step, the seconds of the GPU's work that each call of the named operators launched.

    Work that no such operator launched is left out, and so are collectives.
    """
    recorded, launches = set(names), Launches(events)
    calls = outermost(e for e in events if e.category == "cpu_op" and e.name in recorded)
    enclosing = Enclosing(calls)
    seconds_by_call: dict[int, float] = defaultdict(float)  # by id: an event has no hash
    for work in filter(is_work, events):
        launched = launches.of(work)
        call = enclosing.at(launched) if launched and not is_collective(work) else None
        if call is not None:
            seconds_by_call[id(call)] += (work.end - work.start) * US
    return [_within(step, calls, seconds_by_call) for step in steps_of(events)]


def _within(step: Event, calls: Sequence[Event], seconds: dict[int, float]) -> Times:
    times: Times = defaultdict(list)
    for call in calls:
        if step.start <= call.start < step.end:
            times[call.name].append((seconds.get(id(call), 0.0), 0))
    return times
