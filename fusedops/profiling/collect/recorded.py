"""Turns the recorded steps of a loop into evidence, without running a step again."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.machine import usable_cpus
from fusedops.measuring.snapshot import Snapshot, shared_copy
from fusedops.patching import patch
from fusedops.patching.core.swap import fused_modules
from fusedops.profiling.collect.about import about, devices_of
from fusedops.profiling.collect.ceilings import ceilings
from fusedops.profiling.collect.operators import flops_of
from fusedops.profiling.collect.optimizers import time_optimizers
from fusedops.profiling.collect.recorded_step import RecordedStep
from fusedops.profiling.collect.replayed import Batch, compiled_flops
from fusedops.profiling.collect.training import largest, parameters_of
from fusedops.profiling.evidence import Evidence, Loader, Patching, Run, Tokens
from fusedops.profiling.shares import raised, without_wait

__all__ = ["evidence_of", "with_experiments"]

PASSIVE = (
    "contention with the loader, elasticity, memory, and what patch saves: these need experiments, "
    "of `fusedops profile --experiments SCRIPT` or of fusedops.profile",
)
COMPILED_MODEL = (
    "operators: the model is compiled; apart from its arithmetic, its time counts as slow kernels"
)
NO_LOADER = "input: no torch DataLoader was read"
OWN_SHARE, OWN_S = 0.1, 1e-3  # of a step, and seconds, from which a loop's own code is its input
TIMING_S = 10.0  # seconds for timing optimizers on tensors like the user's


def evidence_of(
    run: Run,
    model: nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    tokens: Tokens,
    recorded: RecordedStep | None,
    loader: Loader | None,
    before_forward: Sequence[tuple[float, float]],
    compiled_inputs: Sequence[Batch],
) -> Evidence:
    """The evidence of a loop's steps; torch's, Python's and numpy's generators stay as they are.

    before_forward: wall and CPU seconds of each step's beginning. compiled_inputs: of a step, if
    the model is compiled.
    """
    not_checked: list[str] = []
    if loader is None:
        run, reason = _with_own_input(run, before_forward)
        not_checked.append(reason)
    if torch.get_num_threads() > usable_cpus():  # its own threads interrupt it
        run = replace(run, preempted=())
    on_cpu = not torch.cuda.is_initialized() and devices_of(model) <= {"cpu"}
    optimizer = largest(optimizers)
    with Snapshot(None, None):
        flops, reason = _flops(model, recorded, compiled_inputs)
        not_checked += [reason] if reason else []
        profiled = None
        if flops and recorded is not None and on_cpu:
            times = without_wait(run), median(run.optimizer), sum(map(_moved, optimizers))
            profiled = recorded.profiled(*times, flops)
            flops = flops if recorded.compiled else flops_of(profiled)
        elif flops:
            not_checked.append("operators: only those of CPUs are recorded in a loop")
        peaks = ceilings({*flops, "bfloat16"}) if flops else None
        patching, reason = _sites(model)
        not_checked += [f"sites of patch: {reason}"] if reason else []
        timed, reason = time_optimizers(optimizer, perf_counter() + TIMING_S)
        not_checked += [f"saving of another AdamW: {reason}"] if reason else []
    evidence = Evidence(
        plain=run,
        loader=loader,
        tokens=tokens,
        ceilings=peaks,
        profiled=profiled,
        patching=patching,
        optimizers=timed,
        flops=flops,
        device="cpu" if on_cpu else "cuda",
        threads=torch.get_num_threads(),
        cpus=usable_cpus(),
        recorded=True,
        about=about(model, optimizer) | _named(optimizers),
        not_checked=(*not_checked, *PASSIVE),
    )
    return replace(evidence, ceilings=raised(evidence))


def _flops(
    model: nn.Module | None, recorded: RecordedStep | None, compiled_inputs: Sequence[Batch]
) -> tuple[dict[str, int] | None, str]:
    """The operations of the recorded step by dtype, and what is not known of them."""
    if recorded is not None and recorded.compiled and model is not None:
        if not compiled_inputs:
            return None, "arithmetic and operators: the model is compiled, and no input was seen"
        try:
            return compiled_flops(model, compiled_inputs), COMPILED_MODEL
        except Exception as error:  # noqa: BLE001  a model's own code, on the meta device
            reason = (
                f"the model is compiled, and on the meta device {type(error).__name__}: {error}"
            )
            return None, f"arithmetic and operators: {reason}"
    if recorded is None or not recorded.flops:
        return None, "arithmetic and operators: no forward was seen in the warm-up"
    return recorded.flops, ""


def with_experiments(recorded: Evidence, tried: Evidence) -> Evidence:
    """A loop's own steps, and what experiments on its batches showed."""
    left = [line for line in tried.not_checked if not line.startswith("restore")]
    left += [line for line in recorded.not_checked if line not in PASSIVE]
    evidence = replace(
        recorded,
        cached=tried.cached,
        half=tried.half,
        fewer_threads=tried.fewer_threads,
        ceilings=tried.ceilings or recorded.ceilings,
        profiled=recorded.profiled or tried.profiled,
        gpu=tried.gpu,
        flops=recorded.flops or tried.flops,
        patching=tried.patching or recorded.patching,
        autocast=tried.autocast,
        memory=tried.memory,
        activations=tried.activations,
        not_checked=tuple(dict.fromkeys(left)),
    )
    return replace(evidence, ceilings=raised(evidence))  # by the loop's own operators too


def _with_own_input(run: Run, before: Sequence[tuple[float, float]]) -> tuple[Run, str]:
    """The run in which a loop's long way to its forward is a wait for data, and a remark."""
    waits = [seconds for seconds, _ in before]
    if not waits or median(waits) < max(OWN_S, OWN_SHARE * median(run.seconds)):
        return run, NO_LOADER
    cpu = tuple(max(0.0, whole - part) for whole, (_, part) in zip(run.cpu, before, strict=True))
    remark = "; what the loop does before its forward counts"
    return replace(run, wait=tuple(waits), cpu=cpu), NO_LOADER + remark


def _moved(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an optimizer's step reads and writes at least."""
    total = 0
    for p in parameters_of(optimizer):
        state = optimizer.state.get(p, {}).values()
        held = sum(t.nbytes for t in state if isinstance(t, Tensor))
        total += 3 * p.nbytes + 2 * held if held or p.grad is not None else 0
    return total


def _named(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    names = [f"{type(o).__name__} of {len(parameters_of(o))} parameters" for o in optimizers]
    return {"optimizers": names} if len(names) > 1 else {}


def _sites(model: nn.Module | None) -> tuple[Patching | None, str]:
    """How many sites patch would fuse, counted on a copy that shares the model's tensors."""
    if model is None or fused_modules(model):
        return None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # patch warns where it finds nothing
            report = patch(shared_copy(model, "profile"))
    except Exception as error:  # noqa: BLE001  a model's own code, which a copy may run
        return None, f"{type(error).__name__}: {error}"
    sites = {kind: fused for kind, (fused, _) in report.coverage.items() if fused}
    return (Patching(sites) if sites else None), ""
