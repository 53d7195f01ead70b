"""Turns the recorded steps of a loop into evidence, without running a step again."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedops.machine import usable_cpus
from fusedops.measuring.snapshot import Snapshot, shared_copy
from fusedops.patching import patch
from fusedops.patching.core.swap import fused_modules
from fusedops.profiling.collect.about import about, devices_of
from fusedops.profiling.collect.calls import is_compiled
from fusedops.profiling.collect.ceilings import ceilings
from fusedops.profiling.collect.operators import flops_of
from fusedops.profiling.collect.optimizers import time_optimizers
from fusedops.profiling.collect.recorded_step import RecordedStep
from fusedops.profiling.collect.training import largest, parameters_of
from fusedops.profiling.evidence import Evidence, Loader, Patching, Run, Tokens
from fusedops.profiling.shares import raised, without_wait

__all__ = ["Batch", "evidence_of", "replayed_step", "with_experiments"]

PASSIVE = (
    "contention with the loader: needs the experiments of fusedops.profile",
    "elasticity: needs the experiments of fusedops.profile",
    "memory: needs the experiments of fusedops.profile",
)
NO_LOADER = "input: no torch DataLoader was read"
OWN_SHARE, OWN_S = 0.1, 1e-3  # of a step, and seconds, from which a loop's own code is its input
TIMING_S = 10.0  # seconds for timing optimizers on tensors like the user's


class Batch(NamedTuple):
    """The arguments of one forward; autocast: its dtype, None outside of autocast."""

    args: tuple
    kwargs: dict[str, Any]
    autocast: torch.dtype | None

    @staticmethod
    def of(args: tuple, kwargs: dict[str, Any], device: str) -> "Batch":
        cast = torch.is_autocast_enabled(device)
        return Batch(args, kwargs, torch.get_autocast_dtype(device) if cast else None)


def evidence_of(
    run: Run,
    model: nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    tokens: Tokens,
    recorded: RecordedStep | None,
    loader: Loader | None,
    before_forward: Sequence[tuple[float, float]],
) -> Evidence:
    """The evidence of a loop's steps; torch's, Python's and numpy's generators stay as they are.

    before_forward: wall and CPU seconds of each step's beginning.
    """
    not_checked: list[str] = []
    if loader is None:
        run, reason = _with_own_input(run, before_forward)
        not_checked.append(reason)
    if torch.get_num_threads() > usable_cpus():  # its own threads interrupt it
        run = replace(run, preempted=())
    on_cpu = not torch.cuda.is_initialized() and devices_of(model) <= {"cpu"}
    profiled = None
    if recorded is None or not recorded.flops:
        compiled = (recorded is not None and recorded.compiled) or (
            model is not None and is_compiled(model)
        )
        reason = "the model is compiled" if compiled else "no model or no warm-up"
        not_checked.append(f"arithmetic and operators: {reason}")
    elif on_cpu:
        moved = sum(map(_moved, optimizers))
        profiled = recorded.profiled(without_wait(run), median(run.optimizer), moved)
    else:
        not_checked.append("operators: only those of CPUs are recorded in a loop")
    optimizer = largest(optimizers)
    with Snapshot(None, None):
        flops = flops_of(profiled) or (recorded.flops if recorded else None) or None
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


def replayed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Sequence[Batch]], None]:
    """A training step on the inputs of a recorded one.

    Its loss is the model's own; the mean of the outputs stands for one that the loop computes.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")

    def step(batches: Sequence[Batch]) -> None:
        for args, kwargs, cast in batches:
            with torch.autocast(device, cast or torch.bfloat16, enabled=cast is not None):
                loss = _loss(model(*args, **kwargs))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss(outputs: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.sum()
    values = tree_leaves(outputs if isinstance(outputs, Tensor | list | tuple) else vars(outputs))
    terms = [t for t in values if isinstance(t, Tensor) and t.requires_grad]
    scalars = [t for t in terms if t.dim() == 0]  # nanoGPT's (logits, loss)
    if not terms:
        raise RuntimeError("profile: experiments need a model whose outputs have gradients")
    return torch.stack([t.float().mean() for t in scalars or terms]).sum()


def with_experiments(recorded: Evidence, tried: Evidence) -> Evidence:
    """A loop's own steps, and what experiments on its batches showed."""
    left = [line for line in tried.not_checked if not line.startswith("restore")]
    left += [line for line in recorded.not_checked if line not in PASSIVE]
    return replace(
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
