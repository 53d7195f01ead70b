"""Runs a profile's experiments in order, within its time budget."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fusedops.backends import version_of
from fusedops.machine import usable_cpus
from fusedops.measuring.changes import frozen_linears
from fusedops.measuring.driver import Driver
from fusedops.measuring.environment import versions
from fusedops.measuring.snapshot import Snapshot
from fusedops.profiling.collect.alternatives import time_changes
from fusedops.profiling.collect.batches import count_tokens, mean_tokens
from fusedops.profiling.collect.data import Data
from fusedops.profiling.collect.gpu.live import collect_on_gpu, uses_gpu
from fusedops.profiling.collect.measurements import (
    Measurements,
    collect_on_cpu,
    devices_of,
    flops_of,
)
from fusedops.profiling.collect.series import Phases
from fusedops.profiling.collect.steps import MeasuredSteps, StepsPlan, measure_steps
from fusedops.profiling.evidence import Evidence, Run
from fusedops.profiling.planning.step import blocks
from fusedops.profiling.shares import raised

__all__ = ["ProfiledStep", "about", "collect"]

BLOCKED = 4096  # elements from which AdamW8bit has 8-bit moments
STEPS_PART = 0.6  # of the budget goes to plain steps, the rest to the table of operators


@dataclass(frozen=True)
class ProfiledStep:
    """What is profiled, as the user gave it. The fields are `fusedops.profile`'s arguments."""

    step: Callable[..., Any]
    data: Iterable[Any] | None = None
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    tokens: int | Callable[[Any], int] | None = None

    @property
    def device_index(self) -> int | None:
        """The first GPU that holds a parameter of the model."""
        parameters = self.model.parameters() if self.model is not None else ()
        return next((p.device.index for p in parameters if p.device.type == "cuda"), None)


def collect(
    subject: ProfiledStep,
    steps: int,
    warmup: int,
    budget_s: float,
    restore: bool,
    on_step: Callable[[], None] = lambda: None,
    driver: Driver | None = None,
) -> tuple[Evidence, Callable[[], Any]]:
    """The evidence, and a call that runs one more step on a kept batch.

    on_step: called after each step, for a progress bar. driver: the GPU to use; by default
    the model's, else the current one.
    """
    model, optimizer = subject.model, subject.optimizer
    driver = driver or Driver(index=subject.device_index)
    start = perf_counter()
    with Snapshot(model, optimizer) if restore else nullcontext():
        with Phases(model, driver) as phases:
            data = None if subject.data is None else Data(subject.data)
            plan = StepsPlan(
                steps,
                warmup,
                start + STEPS_PART * budget_s,
                on_step,
                lambda batch: count_tokens(batch, subject.tokens),
                driver,
            )
            measured = measure_steps(subject.step, data, phases, plan, usable_cpus())
        description = about(model, optimizer)
        if on_gpu := uses_gpu(model, measured, driver.kind):
            measured = _without_preemptions(measured)
            description |= {"device": driver.properties().name, "cpu": description["device"]}
            description["gpus"] = driver.count()
            measurements = collect_on_gpu(
                measured, model, optimizer, driver, start + budget_s, on_step
            )
        else:
            measurements = collect_on_cpu(measured, model, optimizer, start + budget_s, on_step)
        if model is not None:
            time_changes(measurements, measured, model, optimizer, start + budget_s, restore)
    if restore and model is None and optimizer is None:
        measurements.not_checked.append("restore: no model and no optimizer were given")
    evidence = _evidence(
        subject, measured, measurements, description, "cuda" if on_gpu else _device(model)
    )
    return evidence, _ended(measured.call, driver) if on_gpu else measured.call


def _without_preemptions(measured: MeasuredSteps) -> MeasuredSteps:
    """A GPU works on while the host's thread is preempted, so that time belongs to the step."""

    def without(run: Run | None) -> Run | None:
        return None if run is None else replace(run, preempted=())

    return replace(
        measured,
        plain=replace(measured.plain, preempted=()),
        cached=without(measured.cached),
        half=without(measured.half),
        fewer_threads=without(measured.fewer_threads),
    )


def _ended(call: Callable[[], Any], driver: Driver) -> Callable[[], Any]:
    """The step with a wait for the GPU at its end."""

    def run() -> Any:
        result = call()
        driver.synchronize()
        return result

    return run


def _device(model: nn.Module | None) -> str:
    """The type of the device that computes the step, as far as the model says it."""
    others = sorted(devices_of(model) - {"cpu"})
    return others[0] if others else "cpu"


def _evidence(
    subject: ProfiledStep,
    measured: MeasuredSteps,
    measurements: Measurements,
    description: dict[str, Any],
    device: str,
) -> Evidence:
    counted = mean_tokens(measured.counted)
    if subject.data is None and isinstance(subject.tokens, int):
        counted = count_tokens(None, subject.tokens)
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if ranks else 1
    not_checked = [*measured.not_checked, *measurements.not_checked]
    if processes == 1:
        not_checked.append("communication: one process")
    elif measurements.gpu is None:
        not_checked.append(f"communication: collectives of {processes} processes are not timed")
    evidence = Evidence(
        plain=measured.plain,
        cached=measured.cached,
        half=measured.half,
        fewer_threads=measured.fewer_threads,
        loader=measured.loader,
        tokens=counted,
        ceilings=measurements.ceilings,
        profiled=measurements.profiled,
        gpu=measurements.gpu,
        flops=flops_of(measurements.profiled),
        memory=measurements.memory,
        patching=measurements.patching,
        activations=measurements.activations,
        autocast=measurements.autocast,
        optimizers=measurements.optimizers,
        device=device,
        threads=torch.get_num_threads(),
        cpus=usable_cpus(),
        processes=processes,
        about=description,
        not_checked=tuple(not_checked),
    )
    return replace(evidence, ceilings=raised(evidence))


def _checkpointing(model: nn.Module) -> str:
    """The method of transformers that checkpoints all blocks; empty without one."""
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    supported = getattr(model, "supports_gradient_checkpointing", False)
    return next((name for name in names if supported and hasattr(model, name)), "")


def _sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the parameters: DTensors, or those of the first FSDP."""
    names = {type(module).__name__ for module in model.modules()}
    sharded = any(hasattr(p, "_local_tensor") for p in model.parameters())
    return sharded or "FullyShardedDataParallel" in names


def about(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """What a report says of the machine, the versions, the model and the optimizer's state."""
    description: dict[str, Any] = versions() | {"fusedops": version_of("fusedops")}
    if model is not None:
        parameters = list(model.parameters())
        frozen = [linear.weight for linear in dict.fromkeys(frozen_linears(model).values())]
        description |= {
            "parameter_bytes": sum(p.nbytes for p in parameters),
            "frozen_bytes": sum(p.nbytes for p in frozen),
            "frozen_elements": sum(p.numel() for p in frozen),
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "dtype": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
            "blocks": len(blocks(model)),
            "checkpointing": _checkpointing(model),
            "sharded": _sharded(model),
        }
    if isinstance(optimizer, torch.optim.AdamW):
        state = {p: values for p, values in optimizer.state.items() if p.numel() >= BLOCKED}
        tensors = [t for values in state.values() for t in values.values()]
        description |= {
            "adamw_elements": sum(p.numel() for p in state),
            "adamw_bytes": sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)),
        }
    return description
