"""Measures a step on a GPU by running it again under a profiler and other tools."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch import nn

from fusedops.measuring.driver import Driver
from fusedops.measuring.memory.measured import measure_memory
from fusedops.profiling.collect.gpu.ceilings import gpu_ceilings
from fusedops.profiling.collect.gpu.clocks import slowed_by
from fusedops.profiling.collect.gpu.kernels import device_table
from fusedops.profiling.collect.gpu.syncs import synchronizing_lines
from fusedops.profiling.collect.gpu.traced import STEPS, traced
from fusedops.profiling.collect.gpu.work import gpu_of
from fusedops.profiling.collect.kineto import Event, is_work
from fusedops.profiling.collect.measurements import Measurements, devices_of
from fusedops.profiling.collect.operators import Recorder, record
from fusedops.profiling.collect.steps import MeasuredSteps
from fusedops.profiling.collect.trace import work_of

__all__ = ["collect_on_gpu", "uses_gpu"]

NO_KERNEL = "torch.profiler recorded no kernel: CUPTI is missing, or another profiler uses it"
NO_CLOCK = "clocks: NVML cannot be asked; pip install nvidia-ml-py"
RECORDING = 3  # a step that is recorded or watched takes at most as long as so many others
EXPORT_S = 2  # seconds for writing and reading a trace

T = TypeVar("T")


def uses_gpu(model: nn.Module | None, measured: MeasuredSteps, kind: str = "cuda") -> bool:
    """Whether the model is on a GPU, or the steps made tensors there."""
    allocated = measured.allocated
    return kind in devices_of(model) or (allocated is not None and allocated.tensors > 0)


def collect_on_gpu(
    measured: MeasuredSteps,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    driver: Driver,
    deadline: float,
    on_step: Callable[[], None] = lambda: None,
) -> Measurements:
    """Runs the measured step a few more times. deadline: a `perf_counter` time."""
    measurements, call = Measurements(), measured.call
    longest = median((measured.cached or measured.plain).seconds)

    def tried(part: str, steps: int, run: Callable[[], T], more_s: float = 0.0) -> T | None:
        """The result; None, with the reason among `not_checked`, if there is none."""
        if perf_counter() + steps * longest + more_s > deadline:
            measurements.not_checked.append(f"{part}: the budget had no time for it")
            return None
        try:
            return run()
        except Exception as error:  # noqa: BLE001  the user's step, under a collector
            measurements.not_checked.append(
                f"{part}: a step raised {type(error).__name__}: {error}"
            )
            return None
        finally:
            driver.synchronize()
            on_step()

    clocks: list[tuple[str, ...] | None] = []

    def read_clocks() -> None:
        clocks.append(slowed_by(str(driver.properties().uuid)))

    events = tried("GPU", 1 + STEPS, lambda: traced(call, driver, read_clocks), EXPORT_S)
    if events is not None and not any(map(is_work, events)):
        measurements.not_checked.append(f"GPU: {NO_KERNEL}")
        events = None
    lines = tried("lines that wait", 1, lambda: synchronizing_lines(call, driver.cuda))
    recorder = tried("operators", RECORDING, lambda: record(call))
    use = tried(
        "memory",
        RECORDING,
        lambda: measure_memory(call, model=model, optimizer=optimizer, driver=driver),
        EXPORT_S,
    )
    if use is not None:
        measurements.use(use)
    if events is None:
        return measurements
    slowed = clocks[-1] if clocks else None
    if slowed is None:
        measurements.not_checked.append(NO_CLOCK)
    measurements.gpu = gpu_of(
        work_of(events), measured.plain, measured.allocated, lines or (), slowed
    )
    if recorder is not None:
        _add_table(measurements, recorder, events, driver)
    return measurements


def _add_table(
    measurements: Measurements, recorder: Recorder, events: list[Event], driver: Driver
) -> None:
    """The operators, and the ceilings that they are compared with."""
    measurements.profiled = device_table(recorder, events)
    dtypes = {op.dtype for op in measurements.profiled.ops if op.flops}
    measurements.ceilings = gpu_ceilings({*dtypes, "bfloat16"}, driver)
