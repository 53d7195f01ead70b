"""Measures a step's operators and memory on a CPU; defines `Measurements`, which holds results."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from torch import nn

from fusedops.measuring.memory.measured import measure_memory
from fusedops.measuring.memory.memory_use import MemoryUse
from fusedops.profiling.collect.ceilings import ceilings
from fusedops.profiling.collect.operators import table
from fusedops.profiling.collect.steps import MeasuredSteps
from fusedops.profiling.evidence import (
    Autocast,
    Ceilings,
    Gpu,
    OptimizerTime,
    Patching,
    Profiled,
)

__all__ = ["Measurements", "collect_on_cpu", "devices_of", "flops_of", "no_table"]

TABLE = 8  # a table of operators takes about as long as so many steps, and a second or two
MEMORY = 3  # measuring the memory of a step takes less than so many steps
CHANGES, CHANGES_S = 10, 6.0  # timing parts of a step under changes: so many steps, and seconds
LARGEST = 10  # modules by what they save for backward


@dataclass
class Measurements:
    """None for what was not measured; `not_checked` has the reasons."""

    gpu: Gpu | None = None
    profiled: Profiled | None = None
    memory: dict[str, int] | None = None
    activations: dict[str, int] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    patching: Patching | None = None
    autocast: Autocast | None = None
    optimizers: tuple[OptimizerTime, ...] | None = None
    not_checked: list[str] = field(default_factory=list)

    def use(self, use: MemoryUse) -> None:
        """Adds a step's bytes."""
        self.memory = {k: v for k, v in use.to_dict().items() if isinstance(v, int)}
        self.activations = dict(itertools.islice(use.modules.items(), LARGEST))


def collect_on_cpu(
    measured: MeasuredSteps,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    deadline: float,
    on_step: Callable[[], None],
) -> Measurements:
    """Runs the measured step a few more times. deadline: a `perf_counter` time."""
    others = sorted(devices_of(model) - {"cpu", "meta"})
    reason = f"the work of {', '.join(others)} is not recorded" if others else "none was used"
    measurements = Measurements(not_checked=[f"GPU: {reason}"])
    longest = median((measured.cached or measured.plain).seconds)
    _add_table(measurements, measured, model, longest, deadline, on_step)
    _add_memory(measurements, measured, model, optimizer, longest, deadline)
    flops = flops_of(measurements.profiled)
    measurements.ceilings = ceilings({*(flops or ()), *(("bfloat16",) if flops else ())})
    return measurements


def flops_of(profiled: Profiled | None) -> dict[str, int] | None:
    """Arithmetic of a step by dtype."""
    if profiled is None:
        return None
    sums: Counter[str] = Counter()
    for op in profiled.ops:
        sums[op.dtype] += op.flops
    return dict(+sums)


def devices_of(model: nn.Module | None) -> set[str]:
    """Types of the devices that hold a model's parameters and buffers."""
    if model is None:
        return set()
    return {t.device.type for t in itertools.chain(model.parameters(), model.buffers())}


def _add_table(
    measurements: Measurements,
    measured: MeasuredSteps,
    model: nn.Module | None,
    longest: float,
    deadline: float,
    on_step: Callable[[], None],
) -> None:
    reason = no_table(model)
    if not reason and perf_counter() + TABLE * longest + 2 > deadline:
        reason = "the budget had no time for it"
    if not reason:
        try:
            last = deadline - (MEMORY + CHANGES) * longest - CHANGES_S
            measurements.profiled = table(measured.call, last, on_step)
            return
        except Exception as error:  # noqa: BLE001  the user's step, in a mode that it may not take
            reason = f"a recorded step raised {type(error).__name__}: {error}"
    measurements.not_checked.append(f"operators: {reason}")


def no_table(model: nn.Module | None) -> str:
    """Why a model's operators cannot be recorded one by one; empty if they can."""
    devices = sorted(devices_of(model))
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices, {', '.join(devices)}"
    if devices not in ([], ["cpu"]):
        return f"the model is on {devices[0]}, and only those of CPUs and CUDA are recorded"
    return ""


def _add_memory(
    measurements: Measurements,
    measured: MeasuredSteps,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    longest: float,
    deadline: float,
) -> None:
    """Adds a step's bytes by category."""
    reason = ""
    if places := devices_of(model) - {"cpu"}:
        where = ", ".join(sorted(places))
        reason = f"the model is on {where}, and only that of CPUs and CUDA is measured"
    if not reason and perf_counter() + MEMORY * longest > deadline:
        reason = "the budget had no time for it"
    if not reason:
        try:
            use = measure_memory(measured.call, model=model, optimizer=optimizer)
        except Exception as error:  # noqa: BLE001  the user's step, under hooks and a profiler
            reason = f"a watched step raised {type(error).__name__}: {error}"
        else:
            measurements.use(use)
            return
    measurements.not_checked.append(f"memory: {reason}")
