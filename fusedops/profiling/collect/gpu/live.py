"""Measures a step on a GPU by running it again under a profiler and other tools."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from fusedops.measuring.driver import Driver
from fusedops.profiling.collect.about import devices_of
from fusedops.profiling.collect.attempts import Attempts
from fusedops.profiling.collect.gpu.allocator import Allocations
from fusedops.profiling.collect.gpu.ceilings import gpu_ceilings
from fusedops.profiling.collect.gpu.kernels import device_table
from fusedops.profiling.collect.gpu.watched import STEPS, slowed_by, synchronizing_lines, traced
from fusedops.profiling.collect.kineto import is_work
from fusedops.profiling.collect.operators import flops_of, record
from fusedops.profiling.collect.trace import gpu_of, work_of
from fusedops.profiling.evidence import Evidence, Run

__all__ = ["measure_on_gpu", "uses_gpu"]

NO_KERNEL = "torch.profiler recorded no kernel: CUPTI is missing, or another profiler uses it"
NO_CLOCK = "NVML cannot be asked; pip install nvidia-ml-py"
RECORDING = 3  # a step that is recorded or watched takes at most as long as so many others
EXPORT_S = 2  # seconds for writing and reading a trace


def uses_gpu(model: nn.Module | None, allocated: Allocations | None, kind: str = "cuda") -> bool:
    """Whether the model is on a GPU, or the steps made tensors there."""
    return kind in devices_of(model) or (allocated is not None and allocated.tensors > 0)


def measure_on_gpu(
    attempts: Attempts,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    driver: Driver,
    allocated: Allocations | None,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Adds the GPU's work, the table of operators, the memory of a step, and the ceilings."""

    def ended() -> None:
        driver.synchronize()
        on_step()

    clocks: list[tuple[str, ...] | None] = []

    def read_clocks() -> None:
        clocks.append(slowed_by(str(driver.properties().uuid)))

    attempts.after_each = ended
    attempts.evidence = _described(_without_preemptions(attempts.evidence), driver)
    call = attempts.call
    events = attempts.tried("GPU", 1 + STEPS, lambda: traced(call, driver, read_clocks), EXPORT_S)
    if events is not None and not any(map(is_work, events)):
        attempts.note("GPU", NO_KERNEL)
        events = None
    lines = attempts.tried("lines that wait", 1, lambda: synchronizing_lines(call, driver.cuda))
    recorder = attempts.tried("operators", RECORDING, lambda: record(call))
    attempts.measure_memory(model, optimizer, driver, EXPORT_S)
    if events is None:
        return
    slowed = clocks[-1] if clocks else None
    attempts.note("clocks", NO_CLOCK if slowed is None else "")
    plain = attempts.evidence.plain
    attempts.add(gpu=gpu_of(work_of(events), plain, allocated, lines or (), slowed))
    if recorder is not None:
        profiled = device_table(recorder, events)
        flops = flops_of(profiled) or {}
        ceilings = gpu_ceilings({*flops, "bfloat16"}, driver)
        attempts.add(profiled=profiled, flops=flops, ceilings=ceilings)


def _described(evidence: Evidence, driver: Driver) -> Evidence:
    about = {"device": driver.properties().name, "cpu": evidence.about["device"]}
    return replace(evidence, device="cuda", about=evidence.about | about | {"gpus": driver.count()})


def _without_preemptions(evidence: Evidence) -> Evidence:
    """A GPU works on while the host's thread is preempted, so that time belongs to the step."""

    def without(run: Run | None) -> Run | None:
        return None if run is None else replace(run, preempted=())

    return replace(
        evidence,
        plain=replace(evidence.plain, preempted=()),
        cached=without(evidence.cached),
        half=without(evidence.half),
        fewer_threads=without(evidence.fewer_threads),
    )
