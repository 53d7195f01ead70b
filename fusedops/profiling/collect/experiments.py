"""Runs a profile's experiments in order, within its time budget."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fusedops.machine import usable_cpus
from fusedops.measuring.driver import Driver
from fusedops.measuring.snapshot import Snapshot
from fusedops.profiling.collect.about import about, devices_of
from fusedops.profiling.collect.attempts import MEMORY, Attempts
from fusedops.profiling.collect.autocast import time_autocast
from fusedops.profiling.collect.batches import count_tokens
from fusedops.profiling.collect.ceilings import ceilings
from fusedops.profiling.collect.data import Data
from fusedops.profiling.collect.gpu.live import measure_on_gpu, uses_gpu
from fusedops.profiling.collect.operators import flops_of, table
from fusedops.profiling.collect.optimizers import time_optimizers
from fusedops.profiling.collect.series import Phases
from fusedops.profiling.collect.sites import time_sites
from fusedops.profiling.collect.steps import StepsPlan, measure_steps
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.shares import raised

__all__ = ["ProfiledStep", "collect"]

STEPS_PART = 0.6  # of the budget goes to plain steps, the rest to the table of operators
TABLE = 8  # a table of operators takes about as long as so many steps, and a second or two
CAST = 6  # so do two steps with the calls of one in autocast, and a second or two
SITES = 4  # and timing patch's sites
CHANGES_S = 6.0  # seconds that both take beside their steps
SLOW = "not here, bfloat16 products are no faster than float32 ones on this CPU"


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

    def undone(self, active: bool) -> AbstractContextManager[object]:
        """A block after which the model and the optimizer are as before, if it is active."""
        return Snapshot(self.model, self.optimizer) if active else nullcontext()


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
    model, start = subject.model, perf_counter()
    driver = driver or Driver(index=subject.device_index)
    with subject.undone(restore):
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
            evidence, call, allocated = measure_steps(
                subject.step, data, phases, plan, usable_cpus()
            )
        evidence = replace(
            evidence,
            about=about(model, subject.optimizer),
            device=_device(model),
            processes=_ranks(),
        )
        attempts = Attempts(evidence, call, start + budget_s)
        if uses_gpu(model, allocated, driver.kind):
            measure_on_gpu(attempts, model, subject.optimizer, driver, allocated, on_step)
            call = _ended(call, driver)
        else:
            _measure_on_cpu(attempts, subject, on_step)
        if model is not None:
            _time_changes(attempts, subject, model, restore)
    if restore and model is None and subject.optimizer is None:
        attempts.note("restore", "no model and no optimizer were given")
    _note_communication(attempts)
    evidence = attempts.evidence
    return replace(evidence, ceilings=raised(evidence)), call


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


def _ranks() -> int:
    """How many processes train together."""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ranks else 1


def _note_communication(attempts: Attempts) -> None:
    ranks = attempts.evidence.processes
    if ranks == 1:
        attempts.note("communication", "one process")
    elif attempts.evidence.gpu is None:
        attempts.note("communication", f"collectives of {ranks} processes are not timed")


def _measure_on_cpu(attempts: Attempts, subject: ProfiledStep, on_step: Callable[[], None]) -> None:
    """Adds the table of operators, the memory of a step, and the machine's ceilings."""
    model = subject.model
    others = ", ".join(sorted(devices_of(model) - {"cpu", "meta"}))
    attempts.note("GPU", f"the work of {others} is not recorded" if others else "none was used")
    last = attempts.deadline - (MEMORY + CAST + SITES) * attempts.longest - CHANGES_S
    profiled = attempts.tried(
        "operators", TABLE, lambda: table(attempts.call, last, on_step), 2.0, _no_table(model)
    )
    places = ", ".join(sorted(devices_of(model) - {"cpu"}))
    unseen = f"the model is on {places}, and only that of CPUs and CUDA is measured"
    attempts.measure_memory(model, subject.optimizer, reason=unseen if places else "")
    flops = flops_of(profiled)
    peaks = ceilings({*flops, "bfloat16"} if flops else ())
    attempts.add(profiled=profiled, flops=flops, ceilings=peaks)


def _no_table(model: nn.Module | None) -> str:
    """Why a model's operators cannot be recorded one by one; empty if they can."""
    devices = sorted(devices_of(model))
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices, {', '.join(devices)}"
    if devices not in ([], ["cpu"]):
        return f"the model is on {devices[0]}, and only those of CPUs and CUDA are recorded"
    return ""


def _time_changes(
    attempts: Attempts, subject: ProfiledStep, model: nn.Module, restore: bool
) -> None:
    """Adds the times of a step's parts in autocast, with another optimizer, and patched.

    restore: whether the caller puts everything back at the end, so that it is not done here.
    """
    on_cpu = not devices_of(model) - {"cpu"}
    elsewhere = "" if on_cpu else "only calls on CPUs are timed"
    if _has_float32_products(attempts.evidence):
        if _has_fast_bfloat16(attempts.evidence):
            reason = elsewhere or attempts.no_time(CAST, 2.0)
            if not reason:
                with subject.undone(not restore):
                    timed, reason = time_autocast(attempts.call, attempts.deadline)
                attempts.add(autocast=timed)
            attempts.note("saving of bf16", reason)
        elif on_cpu:
            attempts.note("bf16", SLOW)
    optimizers, reason = time_optimizers(subject.optimizer, attempts.deadline)
    attempts.add(optimizers=optimizers)
    attempts.note("saving of another AdamW", reason)
    reason = elsewhere or attempts.no_time(SITES, 2.0)
    with subject.undone(not restore and not reason):
        patching, reason = time_sites(model, attempts.call, attempts.deadline, reason)
    attempts.add(patching=patching)
    attempts.note("saving of patch", reason)


def _has_float32_products(evidence: Evidence) -> bool:
    """Whether the step has some, and this machine's ceilings are known."""
    ops = evidence.profiled.ops if evidence.profiled and evidence.ceilings else ()
    return any(op.flops and op.dtype == "float32" for op in ops)


def _has_fast_bfloat16(evidence: Evidence) -> bool:
    """Whether this machine is faster at bfloat16 products than at float32 ones."""
    peaks = evidence.ceilings.flops if evidence.ceilings else {}
    return peaks.get("bfloat16", 0.0) > peaks.get("float32", 0.0)
