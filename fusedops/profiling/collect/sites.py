"""Times the calls that `fusedops.patch` would fuse in a step, unpatched and patched."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from fusedops.measuring.memory.measured import measure_memory
from fusedops.patching import patched
from fusedops.patching.core.calls import CallWatch, SiteCall
from fusedops.patching.core.swap import fused_modules, original
from fusedops.profiling.collect.pieces import Timing, time_pieces
from fusedops.profiling.collect.replay import Replay
from fusedops.profiling.evidence import Patching, SiteTime

__all__ = ["time_sites"]

SAMPLES = 4  # calls that stand for all with the same key
UNSEEN = "no call of a site was seen; those of a compiled model are not"

Key = Any
Calls = dict[Key, list[SiteCall]]


def time_sites(
    model: nn.Module, call: Callable[[], Any], deadline: float, reason: str = ""
) -> tuple[Patching | None, str]:
    """What patch would fuse in a model, with the times of its calls; and why there are no times.

    call: one step, which is run once with the model patched. Afterwards the model is unpatched;
    what the step changed stays changed. deadline: a `perf_counter` time. reason: why nothing is to
    be timed. Gives no Patching for a model that is patched already, or in which nothing can be
    fused.
    """
    if fused_modules(model):
        return None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # patch warns where it finds nothing
        with patched(model) as report:
            sites = {kind: n for kind, (n, _) in report.coverage.items() if n}
            if reason or not sites:
                return (Patching(sites), reason) if sites else (None, "")
            try:
                return _timed(model, call, deadline, sites)
            except Exception as error:  # noqa: BLE001  the user's step and its model's code
                return Patching(sites), f"a patched step raised {type(error).__name__}: {error}"


def _timed(
    model: nn.Module, call: Callable[[], Any], deadline: float, sites: dict[str, int]
) -> tuple[Patching, str]:
    seen = _Seen()
    with CallWatch(seen.begins) as watch:
        call()
    if not watch.calls:
        return Patching(sites), UNSEEN
    calls = seen.kernel_calls(watch.calls)
    timings = [Timing(seen.samples[key]) for key in calls]
    around = partial(_as, model)
    for timing in timings:
        timing.warm_up(around)
    sizes = [_bytes(model, seen.samples[key][0], same) for key, same in calls.items()]
    time_pieces(timings, deadline, around)
    timed = (
        _site(t, len(same), n) for t, same, n in zip(timings, calls.values(), sizes, strict=True)
    )
    return Patching(sites, tuple(timed), sum(not call.kernel for call in watch.calls)), ""


class _Seen:
    """A step's calls by key, with samples of each that can be repeated."""

    def __init__(self) -> None:
        self.samples: dict[Key, list[Replay]] = defaultdict(list)
        self._keys: dict[SiteCall, Key] = {}

    def begins(self, call: SiteCall) -> None:
        replay = Replay(call)
        self._keys[call] = replay.key
        if len(self.samples[replay.key]) < SAMPLES:
            self.samples[replay.key].append(replay)

    def kernel_calls(self, calls: Iterable[SiteCall]) -> Calls:
        """The calls that ran kernels; the others would take as long as before."""
        by_key: Calls = defaultdict(list)
        for call in calls:
            if call.kernel:
                by_key[self._keys[call]].append(call)
        return by_key


def _as(model: nn.Module, fused: bool) -> AbstractContextManager[None]:
    return nullcontext() if fused else original(model)


def _site(timing: Timing[Replay], calls: int, size: int) -> SiteTime:
    replay = timing.samples[0]
    times = tuple(timing.before), tuple(timing.after)
    return SiteTime(replay.kind, replay.name, replay.shapes, calls, *times, size)


def _bytes(model: nn.Module, replay: Replay, calls: list[SiteCall]) -> int:
    """How many fewer bytes calls like this one hold at a step's peak.

    Memory usually peaks in the loss, while everything saved for backward is alive.
    """
    if not replay.keeps:
        return 0
    before, after = _held(model, replay, False), _held(model, replay, True)
    return max(Counter(call.forward for call in calls).values()) * (before - after)


def _held(model: nn.Module, replay: Replay, fused: bool) -> int:
    with _as(model, fused):
        if replay.kind == "loss":
            return measure_memory(replay.step(fused)).peak
        return replay.saved_bytes(fused)
