"""Times parts of a step under a change: patched, in autocast, with another optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch
from torch import nn

from fusedops.measuring.snapshot import Snapshot
from fusedops.profiling.collect.autocast import time_autocast
from fusedops.profiling.collect.measurements import Measurements, devices_of
from fusedops.profiling.collect.optimizers import time_optimizers
from fusedops.profiling.collect.sites import time_sites
from fusedops.profiling.collect.steps import MeasuredSteps

__all__ = ["time_changes"]

SITES = 4  # timing patch's sites takes less than so many steps, and a second or two
CAST = 6  # so do two steps with the calls of one in autocast
SLOW = "bf16: not here, bfloat16 products are no faster than float32 ones on this CPU"


def time_changes(
    measurements: Measurements,
    measured: MeasuredSteps,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    deadline: float,
    restore: bool,
) -> None:
    """Adds what was timed on a CPU, and why the rest was not.

    deadline: a `perf_counter` time. restore: whether the caller puts everything back at the end, so
    that it is not done here.
    """
    longest = median((measured.cached or measured.plain).seconds)

    def reason_against(steps: int) -> str:
        reason = "only calls on CPUs are timed" if devices_of(model) - {"cpu"} else ""
        if not reason and perf_counter() + steps * longest + 2 > deadline:
            reason = "the budget had no time for it"
        return reason

    def note(what: str, reason: str) -> None:
        measurements.not_checked += [f"saving of {what}: {reason}"] if reason else []

    if _has_float32_products(measurements):
        if _is_faster(measurements):
            reason = reason_against(CAST)
            if not reason:
                with _undone(model, optimizer, not restore):
                    measurements.autocast, reason = time_autocast(measured.call, deadline)
            note("bf16", reason)
        elif not devices_of(model) - {"cpu"}:
            measurements.not_checked.append(SLOW)
    measurements.optimizers, reason = time_optimizers(optimizer, deadline)
    note("another AdamW", reason)
    reason = reason_against(SITES)
    with _undone(model, optimizer, not restore and not reason):
        measurements.patching, reason = time_sites(model, measured.call, deadline, reason)
    note("patch", reason)


def _has_float32_products(measurements: Measurements) -> bool:
    """Whether the step has some, and this machine's ceilings are known."""
    ops = measurements.profiled.ops if measurements.profiled and measurements.ceilings else ()
    return any(op.flops and op.dtype == "float32" for op in ops)


def _is_faster(measurements: Measurements) -> bool:
    """Whether this machine is faster at bfloat16 products than at float32 ones."""
    peaks = measurements.ceilings.flops if measurements.ceilings else {}
    return peaks.get("bfloat16", 0.0) > peaks.get("float32", 0.0)


@contextmanager
def _undone(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, active: bool
) -> Iterator[None]:
    kept = Snapshot(model, optimizer) if active else None
    try:
        yield
    finally:
        if kept is not None:
            kept.restore()
