"""Measures what repeated calls leave behind: memory, live tensors, Python objects."""

import ctypes
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM, CALLS = 100, 300  # caches fill during the first calls; the others are measured
LIMITS = {"bytes": 0.05 * 2**20, "tensors": 0, "watched": 0, "objects": 2}  # per 100 calls


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """Returns glibc's mallinfo2 (since 2.33), or None for another C library."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


mallinfo2 = _mallinfo2()


def allocated() -> int:
    """Returns malloc's bytes in use: all threads' arenas and mapped blocks.

    CPU tensors come from malloc. Python objects of up to 512 bytes do not.
    """
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class Watch:
    """Counts how many of the watched tensors are still alive."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref] = {}

    def __call__(self, *tensors: object) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                reference = weakref.ref(tensor, self._dead)
                self._alive[id(reference)] = reference

    def _dead(self, reference: weakref.ref) -> None:
        self._alive.pop(id(reference), None)

    def __len__(self) -> int:
        return len(self._alive)


@dataclass(frozen=True)
class Held:
    """The process's memory. objects: the number that the garbage collector tracks."""

    bytes: int
    tensors: int
    watched: int
    objects: int


def held(watch: Watch) -> Held:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(item), torch.Tensor) for item in objects)
    return Held(allocated(), tensors, len(watch), len(objects))


def growth(
    call: Callable[[], None], watch: Watch, warm: int = WARM, calls: int = CALLS
) -> dict[str, float]:
    """Returns what 100 calls leave behind, by LIMITS' keys, after `warm` calls.

    Where something grew, as many calls again decide: a leak goes on, a cache that was filled late
    does not.
    """
    gc.collect()
    _call(call, warm)
    grown = _growth(call, watch, calls - warm)
    if complaints(grown):
        again = _growth(call, watch, calls - warm)
        grown = {name: min(value, again[name]) for name, value in grown.items()}
    return grown


def _growth(call: Callable[[], None], watch: Watch, calls: int) -> dict[str, float]:
    before = held(watch)
    _call(call, calls)
    after = held(watch)
    return {name: (getattr(after, name) - getattr(before, name)) * 100 / calls for name in LIMITS}


def _call(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def complaints(grown: dict[str, float]) -> list[str]:
    """Describes everything that grew beyond its limit."""
    over = {name: grown[name] for name, limit in LIMITS.items() if grown[name] > limit}
    return [f"{value:.0f} {name} in 100 calls" for name, value in over.items()]
