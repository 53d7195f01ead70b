"""Reads a profiled step's batches once, keeps the latest, and times the loader without steps."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import torch

from fusedops.profiling.collect.batches import nbytes
from fusedops.profiling.evidence import Loader

__all__ = ["KEPT_BYTES", "Data"]

KEPT_BYTES, KEPT = 2**28, 8  # at most 256 MiB and 8 batches stay in memory
ALONE_S, ALONE = 2.0, 64  # the loader alone is measured for so long, or so many batches
SAMPLED_EVERY = 0.002  # seconds between two looks at what a synchronous loader runs
NAMED = 0.5  # a function with this share of the loader's time is named


class Data:
    """Batches in the order in which the user's iterable gives them, each read once.

    kept: the latest batches that were read, of at most KEPT_BYTES together. `next` raises
    StopIteration at the end of the data.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        workers = getattr(iterable, "num_workers", 0)
        self.workers = workers if isinstance(workers, int) else 0
        self.kept: list[Any] = []
        self.read = 0
        self.ended = False
        self._iterator: Iterator[Any] | None = iter(iterable)

    @property
    def asynchronous(self) -> bool:
        """Whether other processes make batches while the step runs."""
        return self.workers > 0

    def next(self) -> Any:
        """The next batch, which is not kept."""
        if self._iterator is None:
            raise StopIteration
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.ended = True
            raise
        self.read += 1
        return batch

    def keep(self, batch: Any) -> None:
        """Keeps a batch and drops the oldest ones above the limit."""
        self.kept.append(batch)
        while len(self.kept) > KEPT or sum(map(nbytes, self.kept)) > KEPT_BYTES:
            self.kept.pop(0)

    def alone(self, budget_s: float) -> Loader:
        """Measures how fast batches come when no step runs, and in which Python functions."""
        deadline = perf_counter() + min(ALONE_S, budget_s)
        count, start = 0, perf_counter()
        with _Sampler(not self.asynchronous) as sampler:
            while count < ALONE and perf_counter() < deadline:
                try:
                    self.next()
                except StopIteration:
                    break
                count += 1
        rate = count / (perf_counter() - start) if count >= 3 else None
        return Loader(self.workers, self.asynchronous, rate, sampler.slowest())

    def close(self) -> None:
        """Ends the iterator, and with it a DataLoader's workers."""
        self._iterator = None


class _Sampler:
    """Looks at the Python frames of the thread that entered it, from another thread."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.looks, self.seen = 0, Counter[str]()
        self._end = threading.Event()
        self._of = threading.get_ident()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_Sampler":
        if self.active:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self.active:
            self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(SAMPLED_EVERY):
            frame = sys._current_frames().get(self._of)
            names = []
            while frame is not None and frame.f_code.co_filename != __file__:
                code = frame.f_code
                names.append(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})")
                frame = frame.f_back
            self.looks += 1
            self.seen.update(dict.fromkeys(names, 1))

    def slowest(self) -> dict[str, float]:
        """The innermost function of the user's that has most of the time, with its share."""
        internal = str(torch.__path__[0])
        shares = {
            name: count / self.looks
            for name, count in self.seen.items()
            if count >= NAMED * self.looks and self.looks >= 10 and internal not in name
        }
        # Every caller of a slow function is slow too: the function itself was seen first.
        name = next(iter(shares), None)
        return {_short(name): shares[name]} if name else {}


def _short(name: str) -> str:
    """A function's name and place; a path below the working directory is relative to that."""
    return name.replace(f"({os.getcwd()}{os.sep}", "(")
