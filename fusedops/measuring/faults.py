"""Measures what page faults cost in this process: what `keep_freed_memory` can save at most."""

import mmap
import resource
from functools import cache
from time import thread_time

import torch
from torch import nn

from fusedops.allocator import returns_freed_memory

__all__ = ["PageFaults", "fault_seconds", "fault_share", "faults_matter", "unmeasured"]

FRESH = 2**26  # bytes that page faults are measured on
TRIES = 5
WORTH = 0.03  # share of the CPU time from which reports name keep_freed_memory
LARGE = 2**25  # bytes of a block that glibc never keeps by itself (DEFAULT_MMAP_THRESHOLD_MAX)


@cache
def fault_seconds() -> float:
    """Seconds of a page fault: fresh memory against the same memory once it is mapped.

    Measured on this machine at the first call in a process, which takes about 0.2 seconds.
    """

    def touch() -> tuple[float, int]:
        fresh = mmap.mmap(-1, FRESH)
        tensor = torch.frombuffer(fresh, dtype=torch.uint8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = thread_time()
        tensor.fill_(1)
        first = thread_time() - start
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        start = thread_time()
        tensor.fill_(2)
        again = thread_time() - start
        del tensor
        fresh.close()
        return max(0.0, first - again), max(1, faults)

    return min(seconds / faults for seconds, faults in (touch() for _ in range(TRIES)))


def fault_share(user: float, system: float, faults: float, each: float) -> float:
    """Share of a run's CPU time that page faults took; at most all of the system's time.

    Args:
        user, system: CPU seconds of all threads.
        faults: page faults.
        each: seconds of one.
    """
    return min(system, faults * each) / (user + system) if user + system > 0 else 0.0


class PageFaults:
    """Counts this process's page faults and CPU seconds between `start` and `stop`.

    intervals: how often it was stopped; the counts are those of all intervals.

    Example:
        >>> faults = PageFaults()
        >>> faults.start()
        >>> step()
        >>> faults.stop()
        >>> faults.share
    """

    def __init__(self) -> None:
        self.intervals = 0
        self._before = self._now()
        self._sums = [0.0, 0.0, 0.0]

    def start(self) -> None:
        """Begins an interval."""
        self._before = self._now()

    def stop(self) -> None:
        """Ends an interval."""
        pairs = zip(self._sums, self._before, self._now(), strict=True)
        self._sums = [total + after - before for total, before, after in pairs]
        self.intervals += 1

    @property
    def share(self) -> float:
        """The share of the CPU time that page faults took."""
        user, system, faults = self._sums
        return fault_share(user, system, faults, fault_seconds())

    def advice(self, measured: str) -> list[str]:
        """One line that names `keep_freed_memory` with its gain; none if it is below 3 %.

        measured: what ran, such as "a training step".
        """
        share = self.share
        if share < WORTH:
            return []
        return [
            f"page faults take {share:.0%} of the CPU time of {measured}: "
            "fusedops.keep_freed_memory() saves about that"
        ]

    @staticmethod
    def _now() -> tuple[float, float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime, used.ru_stime, used.ru_minflt


def faults_matter(model: nn.Module) -> bool:
    """Whether `keep_freed_memory` would change a model's speed: on a CPU, unless it is on."""
    on_cpu = any(p.device.type == "cpu" for p in model.parameters())
    return on_cpu and returns_freed_memory()


def unmeasured(model: nn.Module) -> list[str]:
    """One line that says how to measure `keep_freed_memory`; none for small models."""
    if sum(p.nbytes for p in model.parameters()) < LARGE:  # as are its gradients
        return []
    return [
        'not measured: `fusedops.profile(step).measure("keep_freed_memory")` says what '
        "fusedops.keep_freed_memory() gains"
    ]
