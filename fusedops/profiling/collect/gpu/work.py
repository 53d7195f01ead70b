"""Computes a GPU's work in a step from traced and untraced steps."""

from collections.abc import Sequence
from statistics import median

from fusedops.profiling.collect.gpu.allocator import Allocations
from fusedops.profiling.collect.gpu.syncs import named
from fusedops.profiling.collect.trace import Wait, Work, syncs_of
from fusedops.profiling.evidence import Gpu, Run

__all__ = ["gpu_of"]


def gpu_of(
    work: Work,
    plain: Run,
    allocated: Allocations | None = None,
    lines: Sequence[str] = (),
    slowed_by: tuple[str, ...] | None = None,
) -> Gpu:
    """What the GPU does in a step that is not traced.

    work: from traced steps. Tracing leaves kernel times unchanged but slows the host, so the GPU
    idles longer. plain: steps without a profiler. lines: of the waits in one step.
    slowed_by: None if it was not read.
    """
    step = median(plain.seconds)
    idle = _shrunk(step - work.busy, work.seconds - work.busy)
    synced = median(plain.synced) if plain.synced else work.last_waits
    waits = [
        [Wait(w.where, w.seconds, idle * w.gap) for w in in_step]
        for in_step in named(work.waits, lines)
    ]
    return Gpu(
        busy=min(1.0, work.busy / step),
        host_waits=min(1.0, (synced + work.waiting) / step),
        kernels=round(work.kernels),
        median_kernel=work.median_kernel,
        syncs=syncs_of(waits),
        exposed_communication=work.exposed_communication,
        alloc_retries=allocated.retries if allocated else 0,
        mallocs=allocated.mallocs if allocated else work.mallocs,
        malloc_seconds=work.malloc_seconds,
        throttled=bool(slowed_by),
        slowed_by=slowed_by or (),
        copies=work.copies,
        reserved=allocated.reserved if allocated else None,
    )


def _shrunk(plain: float, traced: float) -> float:
    """Idle time without the profiler over idle time with it, at most 1."""
    return min(1.0, max(0.0, plain) / traced) if traced > 0 else 1.0
