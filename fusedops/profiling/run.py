"""`fusedops.profile`: measures a step, and finds the resource that limits it."""

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusedops.measuring.progress import progress
from fusedops.profiling.collect.everything import Subject, collect
from fusedops.profiling.judge import judge
from fusedops.profiling.report import Profile

__all__ = ["profile"]


def profile(
    step: Callable[..., Any],
    *,
    data: Iterable[Any] | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    tokens: int | Callable[[Any], int] | None = None,
    steps: int = 20,
    warmup: int = 3,
    budget_s: float = 60.0,
    measure: bool = False,
    restore: bool = True,
) -> Profile:
    """Where a training or inference step spends its time, and which resource limits it.

    The verdict rests on experiments: the step as it is, the same step with batches kept in memory,
    with half of the batch, with fewer threads, and this machine's own ceilings. Steps are timed
    without a profiler; torch.profiler only divides them among operators.

    step: `step(batch)` with data, `step()` without. data: an iterable of batches, such as a
    DataLoader, which is read once. Up to 8 batches of 256 MiB together are kept. An iterator's
    position is not restored. model: gives phases, names of modules and what to restore. optimizer:
    gives what to restore. tokens: of a step, as a number or a function of the batch; by default the
    `attention_mask`, the `labels` or the `input_ids` of a dictionary are counted. steps: of each
    kind. warmup: steps before them. budget_s: seconds for all experiments; fewer steps run where
    they are not enough, and what has no time left is in `not_checked`.

    measure: also tries the safe advice in what is left of the budget, and puts everything back; see
    `Profile.measure`. What cannot be tried is in `not_checked`.

    restore: puts parameters, buffers, gradients, optimizer state and the default random generators
    of torch, Python and numpy back, bit for bit. Copies of them are held meanwhile. Generators of
    the user's own, files that a step writes, and schedulers, scalers and counters of its own are
    not put back. False: the steps were real training steps.

    What a step raises is passed on, with a note that names the step. Raises ValueError or TypeError
    for arguments that it cannot use, and ValueError if the data has no batch.
    """
    _check(step, model, optimizer, steps, warmup, budget_s)
    _check_data(data, tokens)
    subject = Subject(step, data, model, optimizer, tokens)
    start = perf_counter()
    with progress("profiling", steps) as tick:
        evidence, call = collect(subject, steps, warmup, budget_s, restore, tick)
    report = Profile(evidence, judge(evidence), subject, call)
    if measure:
        report.measure_safe(max(0.0, budget_s - (perf_counter() - start)))
    return report


def _check(
    step: object, model: object, optimizer: object, steps: int, warmup: int, budget_s: float
) -> None:
    if not callable(step):
        raise TypeError(f"profile: step must be a function, got {type(step).__name__}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"profile: model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"profile: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    for name, module in model.named_modules() if model is not None else ():
        if any(map(is_lazy, module.parameters(recurse=False))):
            where = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(
                f"profile: model must have initialized parameters, got lazy ones in {where}: run a "
                "forward first"
            )
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"profile: {name} must be an integer of at least {least}, got {value}")
    if not budget_s > 0:
        raise ValueError(f"profile: budget_s must be more than 0 seconds, got {budget_s}")


def _check_data(data: object, tokens: object) -> None:
    if data is not None and (
        not isinstance(data, Iterable) or isinstance(data, Mapping | str | bytes)
    ):
        raise TypeError(f"profile: data must be an iterable of batches, got {type(data).__name__}")
    if tokens is None:
        return
    if callable(tokens):
        if data is None:
            raise ValueError("profile: tokens must be an integer without data, got a function")
        return
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        kind = type(tokens).__name__
        raise TypeError(f"profile: tokens must be an integer, a function or None, got {kind}")
    if tokens < 0:
        raise ValueError(f"profile: tokens must be at least 0, got {tokens}")
