"""Measures a GPU's limits with CUDA events: copies, matmuls, launches.

Kept for a day, as the CPU's are. The device is measured as it is, with the clocks that it has then.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import perf_counter

import torch

from fusedops.measuring.driver import Driver, between
from fusedops.profiling.collect.ceilings import kept_ceilings
from fusedops.profiling.evidence import Ceilings

__all__ = ["gpu_ceilings"]

SIZES = (2**22, 2**24, 2**26, 2**28, 2**30)  # bytes of source and destination together
PRODUCT = 8192  # rows and columns of the matrices
LAUNCHES = 256  # fewer than the driver queues, so that the host never waits
TRIES_S = 0.2  # seconds for each number


def gpu_ceilings(dtypes: Iterable[str], driver: Driver) -> Ceilings:
    """The ceilings of a GPU, and the matrix products of these dtypes.

    dtypes: torch's names. float32's product follows torch's setting for TF32. There is no cost of a
    page fault and of a profiler's event, which a GPU's kernels do not pay.
    """
    precision = torch.get_float32_matmul_precision()
    name = driver.properties().name
    about = f"{name} {torch.__version__} {torch.version.cuda} {precision} {SIZES} {PRODUCT}"
    return kept_ceilings(about, partial(_measured, driver), dtypes, partial(_product, driver))


def _measured(driver: Driver) -> Ceilings:
    copies = []
    for size in SIZES:
        with suppress(torch.OutOfMemoryError):
            copies.append((size, _copy(driver, size)))
    return Ceilings(
        copy=tuple(copies),
        flops={},
        op_seconds=_launch(driver),
        fault_seconds=0.0,
        event_seconds=0.0,
    )


def _best(driver: Driver, call: Callable[[], object]) -> float:
    """The shortest time between two events around a call, of at least three."""
    call()
    shortest, count, deadline = float("inf"), 0, perf_counter() + TRIES_S
    while count < 3 or perf_counter() < deadline:
        driver.synchronize()
        first = driver.event()
        call()
        last = driver.event()
        driver.synchronize()
        shortest = min(shortest, between(first, last))
        count += 1
    return shortest


def _copy(driver: Driver, size: int) -> float:
    """Bytes/s, read and written."""
    source = torch.ones(size // 2, dtype=torch.uint8, device=driver.device)
    target = torch.ones_like(source)
    repeats = max(1, min(LAUNCHES, 2**28 // size))

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return repeats * size / _best(driver, copies)


def _product(driver: Driver, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product."""
    n, device = PRODUCT, driver.device
    random = torch.Generator(device).manual_seed(0)  # the user's generator is not touched
    left, right = (
        torch.randn(n, n, generator=random, dtype=torch.float32, device=device).to(dtype)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * n**3 / _best(driver, lambda: torch.mm(left, right, out=out))


def _launch(driver: Driver) -> float:
    """Seconds of an operator on one element, one after the other."""
    element = torch.ones(1, dtype=torch.float32, device=driver.device)

    def calls() -> None:
        for _ in range(LAUNCHES):
            torch.neg(element)

    return _best(driver, calls) / LAUNCHES
