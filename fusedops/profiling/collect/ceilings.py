"""Measures a CPU's limits: speed of copies and matmuls, cost of calls and page faults.

Measured once for a CPU, a number of threads and a torch, and kept for a day in the user's cache
folder. Each number is the best of several tries: a ceiling is what the machine can do.
"""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch

from fusedops.backends import cpu_name
from fusedops.cache import caches
from fusedops.machine import cpus, usable_cpus
from fusedops.measuring.clock import preempted_seconds
from fusedops.measuring.faults import fault_seconds
from fusedops.profiling.evidence import Ceilings

__all__ = ["ceilings", "kept_ceilings"]

SIZES = (2**17, 2**20, 2**22, 2**25, 2**27)  # bytes of source and destination together
PRODUCT = 1024  # rows and columns of the matrices
TRIES_S = 0.25  # seconds for each number
KEPT_S = 24 * 3600
COARSE = 2e-3  # seconds of a call from which the counter of preempted time is fine enough


def ceilings(dtypes: Iterable[str]) -> Ceilings:
    """The ceilings with torch's threads, and the matrix products of these dtypes.

    dtypes: torch's names, such as "float32". Threads beyond the CPUs are left out, because they
    only wait for each other.
    """
    threads = torch.get_num_threads()
    fitting = min(threads, max(1, math.floor(usable_cpus())))
    about = f"{cpu_name()} {cpus()} {fitting} {torch.__version__} {PRODUCT} {SIZES}"
    torch.set_num_threads(fitting)
    try:
        return kept_ceilings(about, _measured, dtypes, _product)
    finally:
        torch.set_num_threads(threads)


def _measured() -> Ceilings:
    return Ceilings(
        copy=tuple((size, _copy(size)) for size in SIZES),
        flops={},
        op_seconds=_call(),
        fault_seconds=fault_seconds(),
        event_seconds=_event(),
    )


def kept_ceilings(
    about: str,
    measure: Callable[[], Ceilings],
    dtypes: Iterable[str],
    product: Callable[[torch.dtype], float],
) -> Ceilings:
    """The ceilings of what `about` says, with the products of these dtypes, kept for a day.

    measure: everything but the products. product: FLOP/s of a dtype.
    """
    path = _kept_at(about)
    kept = _read(path)
    measured = kept or measure()
    missing = [dtype for dtype in sorted(set(dtypes)) if dtype not in measured.flops]
    if missing or not kept:
        measured.flops.update({dtype: product(getattr(torch, dtype)) for dtype in missing})
        _write(path, measured)
    return measured


def _best(call: Callable[[], object], budget_s: float = TRIES_S) -> float:
    """The shortest of the calls within the budget, at least three.

    Time in which other programs had the CPU is taken off.
    """
    call()
    shortest, count, deadline = float("inf"), 0, perf_counter() + budget_s
    while count < 3 or perf_counter() < deadline:
        delayed, start = preempted_seconds(), perf_counter()
        call()
        seconds = perf_counter() - start
        preempted = preempted_seconds() - delayed
        if seconds > COARSE and preempted < 0.9 * seconds:
            seconds -= preempted
        shortest = min(shortest, seconds)
        count += 1
    return shortest


def _copy(size: int) -> float:
    """Bytes/s, read and written."""
    source = torch.ones(size // 2, dtype=torch.uint8, device="cpu")
    target = torch.ones_like(source)
    repeats = max(1, 2**20 // size)

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return repeats * size / _best(copies)


def _product(dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product."""
    random = torch.Generator().manual_seed(0)  # the user's generator is not touched
    left, right = (
        torch.randn(PRODUCT, PRODUCT, generator=random, dtype=torch.float32, device="cpu").to(dtype)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * PRODUCT**3 / _best(lambda: torch.mm(left, right, out=out))


def _call() -> float:
    """Seconds of an operator on one element, called from Python."""
    element = torch.ones(1, dtype=torch.float32, device="cpu")

    def calls() -> None:
        for _ in range(100):
            torch.neg(element)

    return _best(calls) / 100


def _event() -> float:
    """Seconds that torch.profiler adds to an event."""
    element = torch.ones(1, dtype=torch.float32, device="cpu")

    def calls() -> None:
        for _ in range(1000):
            torch.neg(element)

    def profiled() -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            start = perf_counter()
            calls()
            return perf_counter() - start

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profiled()
    return max(0.0, min(profiled() for _ in range(3)) - _best(calls, 0.1)) / 1000


def _kept_at(about: str) -> Path | None:
    """Where the ceilings of what `about` says are kept; None without a folder for caches."""
    name = hashlib.sha256(about.encode()).hexdigest()[:16]
    with suppress(RuntimeError):
        return caches(os.environ) / "profile" / f"ceilings-{name}.json"
    return None


def _read(path: Path | None) -> Ceilings | None:
    """What was kept, unless it is older than a day."""
    if path is None:
        return None
    with suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads(path.read_text())
        if time.time() - values.pop("measured") < KEPT_S:
            return Ceilings(**(values | {"copy": tuple(map(tuple, values["copy"]))}))
    return None


def _write(path: Path | None, ceilings: Ceilings) -> None:
    """A folder that cannot be written only costs the next profile the measuring."""
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(ceilings) | {"measured": time.time()}, file)
        os.replace(file.name, path)
