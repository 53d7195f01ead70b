"""Reads this process's CPU and memory limits from affinity and cgroup.

`fusedops doctor` compares torch's threads with these limits, and a build chooses how many compilers
to run. Needs only the standard library.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

__all__ = [
    "available_memory",
    "compilers",
    "cpu_quota",
    "cpus",
    "memory_limit",
    "read",
    "usable_cpus",
]

T = TypeVar("T", int, float)
COMPILER = 3 * 2**29  # bytes: one g++ with torch's headers takes up to 1.5 GiB


def compilers(root: Path = Path("/")) -> int:
    """How many compilers can run at a time, given the CPUs, the cgroup's quota and the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit(root)
    memory = memory if limit is None else min(memory, limit)
    return max(1, min(math.floor(usable_cpus(root)), memory // COMPILER))


def cpus() -> int:
    """How many CPUs the process may run on."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(affinity) or os.cpu_count() or 1


def usable_cpus(root: Path = Path("/")) -> float:
    """CPUs that the process may use, by its affinity and its cgroup's quota."""
    quota = cpu_quota(root)
    return float(cpus()) if quota is None else min(float(cpus()), quota)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU time, in CPUs, that the process's cgroup and its parents allow; None without a limit."""
    return min(_limits(root, "cpu", _quota_of), default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Memory in bytes that the process's cgroup and its parents allow; None without a limit."""
    return min(_limits(root, "memory", _memory_of), default=None)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that the process can still use: of the machine, and of its cgroup and its parents."""
    lines = [line.split() for line in read(root / "proc/meminfo").splitlines()]
    free = [int(words[1]) * 1024 for words in lines if words[:1] == ["MemAvailable:"]]
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([*(free or [pages]), *_limits(root, "memory", _free_of)]))


def _limits(root: Path, controller: str, of: Callable[[Path], T | None]) -> Iterator[T]:
    for line in read(root / "proc/self/cgroup").splitlines():
        for folder in _cgroup_folders(root / "sys/fs/cgroup", line, controller):
            if (limit := of(folder)) is not None:
                yield limit


def _cgroup_folders(mounted: Path, line: str, controller: str) -> Iterator[Path]:
    """A cgroup's folder and its parents. In a container, the cgroup's own path may not be mounted.

    line: from /proc/self/cgroup, "0::/path" (version 2) or "4:cpu,cpuacct:/path" (version 1).
    """
    _, controllers, path = line.split(":", 2)
    if controllers and controller not in controllers.split(","):
        return
    tops = {mounted / controllers, mounted / controller} if controllers else {mounted}
    inside = Path(path.lstrip("/"))
    yield from (top / part for top in tops for part in (inside, *inside.parents))


def _quota_of(folder: Path) -> float | None:
    quota, period, *_ = [*read(folder / "cpu.max").split(), "", ""]
    if not quota:
        quota = read(folder / "cpu.cfs_quota_us").strip()
        period = read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _memory_of(folder: Path) -> int | None:
    text = read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")
    return int(text) if text.strip().isdigit() else None


def _free_of(folder: Path) -> int | None:
    """What a cgroup may still use. Its files in the page cache count as free: they make way."""
    limit = _memory_of(folder)
    used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")
    if limit is None or not used.strip().isdigit():
        return None
    words = read(folder / "memory.stat").split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return (
        limit - int(used) + int(counts.get("inactive_file", counts.get("total_inactive_file", 0)))
    )


def read(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
