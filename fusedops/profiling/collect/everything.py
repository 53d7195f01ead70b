"""All experiments of a profile, in order, within its budget."""

import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fusedops.backends import cpu_name, version_of
from fusedops.machine import cpu_quota, cpus
from fusedops.profiling.collect.batches import count_tokens, mean_tokens
from fusedops.profiling.collect.ceilings import ceilings
from fusedops.profiling.collect.clock import Phases
from fusedops.profiling.collect.data import Data
from fusedops.profiling.collect.operators import table
from fusedops.profiling.collect.sites import time_sites
from fusedops.profiling.collect.state import Snapshot
from fusedops.profiling.collect.steps import Measured, Plan, measure_steps
from fusedops.profiling.evidence import Evidence, Patching, Profiled
from fusedops.profiling.storage.measured import measure_memory

__all__ = ["Subject", "about", "collect", "usable_cpus"]

TABLE = 8  # a table of operators takes about as long as so many steps, and a second or two
MEMORY = 3  # measuring the memory of a step takes less than so many steps
SITES = 4  # so does timing patch's sites, and a second or two
BLOCKED = 4096  # elements from which AdamW8bit has 8-bit moments
STEPS_PART = 0.6  # of the budget goes to plain steps, the rest to the table of operators


@dataclass(frozen=True)
class Subject:
    """What is profiled, as the user gave it. The fields are `fusedops.profile`'s arguments."""

    step: Callable[..., Any]
    data: Iterable[Any] | None = None
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    tokens: int | Callable[[Any], int] | None = None


def collect(
    subject: Subject,
    steps: int,
    warmup: int,
    budget_s: float,
    restore: bool,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Evidence, Callable[[], Any]]:
    """The evidence, and a call that runs one more step on a kept batch.

    tick: called after each step, for a progress bar.
    """
    start = perf_counter()
    kept = Snapshot(subject.model, subject.optimizer) if restore else None
    try:
        with Phases(subject.model) as phases:
            data = None if subject.data is None else Data(subject.data)
            plan = Plan(
                steps,
                warmup,
                start + STEPS_PART * budget_s,
                tick,
                lambda batch: count_tokens(batch, subject.tokens),
            )
            measured = measure_steps(subject.step, data, phases, plan, usable_cpus())
        profiled = _operators(subject, measured, start + budget_s, tick)
        memory = _memory(subject, measured, start + budget_s)
        patching = _patching(subject, measured, start + budget_s, restore)
        found = about(subject.model, subject.optimizer)
    finally:
        if kept is not None:
            kept.restore()
    if restore and subject.model is None and subject.optimizer is None:
        measured.not_checked.append("restore: no model and no optimizer were given")
    evidence = _evidence(subject, measured, profiled, found)
    return replace(evidence, memory=memory, patching=patching), measured.call


def usable_cpus() -> float:
    """CPUs that the process may use, by its affinity and its cgroup's quota."""
    quota = cpu_quota()
    return float(cpus()) if quota is None else min(float(cpus()), quota)


def _operators(
    subject: Subject, measured: Measured, deadline: float, tick: Callable[[], None]
) -> Profiled | None:
    """The table of operators; None, with the reason among `not_checked`, where it is not made."""
    longest = median((measured.cached or measured.plain).seconds)
    reason = _no_table(subject)
    if not reason and perf_counter() + TABLE * longest + 2 > deadline:
        reason = "the budget had no time for it"
    if not reason:
        try:
            return table(measured.call, deadline - (MEMORY + SITES) * longest - 2, tick)
        except Exception as error:  # noqa: BLE001  the user's step, in a mode that it may not take
            reason = f"a recorded step raised {type(error).__name__}: {error}"
    measured.not_checked.append(f"operators: {reason}")
    return None


def _memory(subject: Subject, measured: Measured, deadline: float) -> dict[str, int] | None:
    """Bytes of a step by category; None, with the reason, where they are not measured."""
    longest = median((measured.cached or measured.plain).seconds)
    reason = "a GPU may be used" if torch.cuda.is_initialized() else ""
    if not reason and (places := _devices(subject.model)) - {"cpu"}:
        reason = f"the model is on {', '.join(sorted(places))}, and only a CPU's is measured"
    if not reason and perf_counter() + MEMORY * longest > deadline:
        reason = "the budget had no time for it"
    if not reason:
        try:
            use = measure_memory(measured.call, model=subject.model, optimizer=subject.optimizer)
        except Exception as error:  # noqa: BLE001  the user's step, under hooks and a profiler
            reason = f"a watched step raised {type(error).__name__}: {error}"
        else:
            return {k: v for k, v in use.to_dict().items() if isinstance(v, int)}
    measured.not_checked.append(f"memory: {reason}")
    return None


def _patching(
    subject: Subject, measured: Measured, deadline: float, restore: bool
) -> Patching | None:
    """What patch would fuse; its calls are timed on a CPU, else `not_checked` has the reason."""
    if subject.model is None:
        return None
    longest = median((measured.cached or measured.plain).seconds)
    reason = _no_table(subject)
    if not reason and perf_counter() + SITES * longest + 2 > deadline:
        reason = "the budget had no time for it"
    kept = None if restore or reason else Snapshot(subject.model, subject.optimizer)
    try:
        found, reason = time_sites(subject.model, measured.call, deadline, reason)
    finally:
        if kept is not None:
            kept.restore()
    if reason:
        measured.not_checked.append(f"saving of patch: {reason}")
    return found


def _no_table(subject: Subject) -> str:
    if torch.cuda.is_initialized():
        return "the step may use a GPU, whose kernels are not recorded"
    devices = sorted(_devices(subject.model))
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices, {', '.join(devices)}"
    if devices not in ([], ["cpu"]):
        return f"the model is on {devices[0]}, and only a CPU's are recorded"
    return ""


def _devices(model: nn.Module | None) -> set[str]:
    """Types of the devices that hold a model's parameters and buffers."""
    if model is None:
        return set()
    return {t.device.type for t in itertools.chain(model.parameters(), model.buffers())}


def _device(model: nn.Module | None) -> str:
    """The type of the device that computes the step, as far as the model says it."""
    others = sorted(_devices(model) - {"cpu"})
    return others[0] if others else "cpu"


def _about_gpus(device: str) -> str:
    if torch.cuda.is_initialized() or device not in ("cpu", "meta"):
        return "GPU: its work is not recorded; use --trace"
    return "GPU: none was used"


def _evidence(
    subject: Subject, measured: Measured, profiled: Profiled | None, found: dict[str, Any]
) -> Evidence:
    counted = mean_tokens(measured.counted)
    if subject.data is None and isinstance(subject.tokens, int):
        counted = count_tokens(None, subject.tokens)
    device = _device(subject.model)
    not_checked = [*measured.not_checked, _about_gpus(device)]
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if ranks else 1
    not_checked.append(
        f"communication: collectives of {processes} processes are not timed on CPUs"
        if processes > 1
        else "communication: one process"
    )
    flops = _flops(profiled) if profiled else None
    return Evidence(
        plain=measured.plain,
        cached=measured.cached,
        half=measured.half,
        fewer_threads=measured.fewer_threads,
        loader=measured.loader,
        tokens=counted,
        ceilings=ceilings({*(flops or ()), *(("bfloat16",) if flops else ())}),
        profiled=profiled,
        flops=flops,
        device=device,
        threads=torch.get_num_threads(),
        cpus=usable_cpus(),
        processes=processes,
        about=found,
        not_checked=tuple(not_checked),
    )


def _flops(profiled: Profiled) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for op in profiled.ops:
        sums[op.dtype] += op.flops
    return dict(+sums)


def about(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """What a report says of the machine, the versions, the model and the optimizer's state."""
    found: dict[str, Any] = {
        "device": cpu_name(),
        "torch": torch.__version__,
        "fusedops": version_of("fusedops"),
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
    }
    if model is not None:
        parameters = list(model.parameters())
        frozen = [p for p in parameters if not p.requires_grad]
        found |= {
            "parameter_bytes": sum(p.nbytes for p in parameters),
            "frozen_bytes": sum(p.nbytes for p in frozen),
            "frozen_elements": sum(p.numel() for p in frozen),
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "dtype": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        }
    if isinstance(optimizer, torch.optim.AdamW):
        state = {p: values for p, values in optimizer.state.items() if p.numel() >= BLOCKED}
        tensors = [t for values in state.values() for t in values.values()]
        found |= {
            "adamw_elements": sum(p.numel() for p in state),
            "adamw_bytes": sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)),
        }
    return found
