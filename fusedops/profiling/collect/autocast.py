"""Times a step's calls unchanged and in bfloat16 autocast.

A step runs as it is and another one in autocast. The n-th call of a function in one is the n-th in
the other, so each pair has the dtypes that the step's own tensors then have, and autocast makes its
casts of weights, inputs and gradients. Calls with the same dtypes in both take the same time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fusedops.patching.core.calls import CallWatch, SiteCall
from fusedops.profiling.collect.pieces import Timing, time_pieces
from fusedops.profiling.collect.replay import Replay, function_call
from fusedops.profiling.evidence import Autocast, SiteTime

__all__ = ["time_autocast"]

MATTER = 0.99  # share of the calls' time that is measured, the heaviest calls first

Key = Any


class Seen(NamedTuple):
    """A call: its key, shapes, and dtypes of inputs and results, if known."""

    key: Key
    shapes: str
    dtypes: tuple | None


def time_autocast(call: Callable[[], Any], deadline: float) -> tuple[Autocast | None, str]:
    """The calls that autocast changes, with their times; or None and the reason.

    call: one step, which is run twice; what it changes stays changed. deadline: a `perf_counter`
    time.
    """
    try:
        plain = _recorded(call)
        with torch.autocast("cpu", torch.bfloat16):
            cast = _recorded(call)
        pairs, left = _pairs(plain, cast)
        timings = {key: Timing([_Pair(plain, cast, key)]) for key in pairs}
        for timing in timings.values():
            timing.warm_up()
        kept = _heaviest({key: n * timings[key].seconds for key, n in pairs.items()})
        time_pieces([timings[key] for key in kept], deadline)
    except Exception as error:  # noqa: BLE001  the user's step, in a mode that it may not take
        return None, f"a step in autocast raised {type(error).__name__}: {error}"
    timed = (_call_time(timings[key], pairs[key]) for key in kept)
    return Autocast(tuple(timed), (plain.kept, cast.kept), left), ""


class _Step(TorchFunctionMode):
    """The calls of torch's functions and of patch's sites in one step, by the function's name.

    Functions that are called by others are part of them. samples: one of each key, to repeat it.
    kept: the most bytes that a forward keeps for its backward, apart from parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Seen]] = defaultdict(list)
        self.samples: dict[Key, Replay] = {}
        self.kept = 0
        self.watch = CallWatch(self._begins)
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._parameters: set[int] = set()
        self._in_backward = False

    def _begins(self, call: SiteCall) -> None:
        if call.inside is None:
            with torch._C.DisableTorchFunction():
                replay = Replay(call)
                self._knows(replay)
                self._add(replay, None)

    def _knows(self, replay: Replay) -> None:
        """Remembers the storages of a call's parameters, since views of them may be saved."""
        for value in (*replay.given, *replay.parameters):
            if isinstance(value, nn.Parameter):
                self._parameters.add(value.untyped_storage().data_ptr())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.watch.inside or _writes(name, kwargs):
            return func(*args, **kwargs)
        replay = function_call(func, args, kwargs) if _has_float(args, kwargs) else None
        if replay is not None:
            self._knows(replay)
        out = func(*args, **kwargs)
        dtypes = _dtypes(out)
        if replay is not None and dtypes:
            self._add(replay, (*_dtypes((args, kwargs)), *dtypes))
        return out

    def _add(self, replay: Replay, dtypes: tuple | None) -> None:
        self.samples.setdefault(replay.key, replay)
        self.calls[replay.kind].append(Seen(replay.key, replay.shapes, dtypes))

    def pack(self, t: Tensor) -> Tensor:
        if self._in_backward:  # that was another forward
            self._sizes.clear()
            self._total, self._in_backward = 0, False
        if t.layout is torch.strided:
            storage = t.untyped_storage()
            place = storage.data_ptr()
            if place not in self._sizes and place not in self._parameters:
                self._sizes[place] = storage.nbytes()
                self._total += storage.nbytes()
                self.kept = max(self.kept, self._total)
        return t.detach()  # with its graph, a saved result would hold itself

    def unpack(self, t: Tensor) -> Tensor:
        self._in_backward = True
        return t


def _recorded(call: Callable[[], Any]) -> _Step:
    step = _Step()
    with step.watch, saved_tensors_hooks(step.pack, step.unpack), step:
        call()
    return step


def _has_float(args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_leaves((args, kwargs)))


def _dtypes(values: Any) -> tuple:
    return tuple(t.dtype for t in tree_leaves(values) if isinstance(t, Tensor))


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into its arguments, so that it must not be repeated."""
    if name.startswith("__"):
        return name in ("__setitem__", "__set__", "__get__") or (
            name.startswith("__i") and name != "__invert__"
        )
    return name.endswith("_") or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def _pairs(plain: _Step, cast: _Step) -> tuple[Counter[tuple[Key, Key]], int]:
    """How often each pair of keys occurs whose dtypes differ, and how many calls have no pair."""
    pairs: Counter[tuple[Key, Key]] = Counter()
    left = 0
    for name, calls in plain.calls.items():
        others = cast.calls.get(name, [])
        if [call.shapes for call in calls] != [call.shapes for call in others]:
            left += len(calls)
            continue
        for call, other in zip(calls, others, strict=True):
            if call.dtypes is None or call.dtypes != other.dtypes:
                pairs[call.key, other.key] += 1
    return pairs, left


class _Pair:
    """A call with the step's own tensors, and in autocast with those of the step in autocast."""

    def __init__(self, plain: _Step, cast: _Step, keys: tuple[Key, Key]) -> None:
        self.plain, self.cast = plain.samples[keys[0]], cast.samples[keys[1]]
        self.seconds = 0.0

    def warm_up(self, changed: bool) -> None:
        replay = self.cast if changed else self.plain
        replay.warm_up(True)
        self.seconds = replay.seconds

    def timed(self, changed: bool) -> float:
        return (self.cast if changed else self.plain).timed(True)


def _heaviest(seconds: dict[Key, float]) -> list[Key]:
    """The calls that take most of the time, the heaviest first."""
    total, left = sum(seconds.values()), MATTER
    heaviest = []
    for key in sorted(seconds, key=seconds.__getitem__, reverse=True):
        if left <= 0:
            break
        heaviest.append(key)
        left -= seconds[key] / total
    return heaviest


def _call_time(timing: Timing[_Pair], calls: int) -> SiteTime:
    replay = timing.samples[0].plain
    times = tuple(timing.before), tuple(timing.after)
    return SiteTime(replay.kind, replay.kind, replay.shapes, calls, *times)
