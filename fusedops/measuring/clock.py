"""Clocks: how long a call takes, and how long a thread waited for a CPU."""

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from fusedops.machine import read

__all__ = [
    "preempted_seconds",
    "running_seconds",
    "throttled_seconds",
    "wall_seconds",
    "withheld",
]


def wall_seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def running_seconds(run: Callable[[], object]) -> float:
    """Seconds of a call, without those in which other programs had the CPU."""
    delayed, start = preempted_seconds(), perf_counter()
    run()
    seconds = perf_counter() - start
    return max(0.02 * seconds, seconds - (preempted_seconds() - delayed))


def preempted_seconds() -> float:
    """For how long this thread was ready to run but did not, so far; 0 where Linux does not say."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # a third of pathlib's time
    except OSError:
        return 0.0
    try:
        words = os.read(file, 100).split()  # running, ready (ns), slices
    finally:
        os.close(file)
    return int(words[1]) / 1e9 if len(words) == 3 else 0.0


def throttled_seconds(root: Path = Path("/")) -> float:
    """For how long the process's cgroup was throttled so far; 0 where that is not known."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / (controllers and "cpu") / path.lstrip("/")
        words = read(folder / "cpu.stat").split()
        counts = dict(zip(words[::2], words[1::2], strict=True))
        if "throttled_usec" in counts:
            return int(counts["throttled_usec"]) / 1e6
        if "throttled_time" in counts:
            return int(counts["throttled_time"]) / 1e9
    return 0.0


def withheld(root: Path = Path("/")) -> tuple[int, int]:
    """Ticks that the hypervisor withheld from this machine so far, and all ticks."""
    words = read(root / "proc/stat").partition("\n")[0].split()[1:]
    ticks = [int(word) for word in words[:8]]  # user nice system idle iowait irq softirq steal
    return (ticks[7] if len(ticks) == 8 else 0), sum(ticks)
