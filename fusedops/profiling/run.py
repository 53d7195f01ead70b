"""`fusedops.profile`: measures a step, and finds the resource that limits it."""

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusedops.measuring.arguments import (
    a_function,
    a_model,
    an_optimizer,
    check_positive,
    check_types,
    check_whole,
)
from fusedops.measuring.progress import progress
from fusedops.profiling.collect.experiments import ProfiledStep, collect
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
    of torch, Python and numpy back, bit for bit, and numbers and generators that modules hold.
    Copies are held meanwhile. Other generators, files that a step writes, and schedulers, scalers
    and counters of its own are not put back. False: the steps were real training steps.

    An error of the step is raised with a note that names the step. Raises ValueError or TypeError
    for arguments that it cannot use, and ValueError if the data has no batch.
    """
    _check(step, model, optimizer, steps, warmup, budget_s)
    _check_data(data, tokens)
    subject = ProfiledStep(step, data, model, optimizer, tokens)
    start = perf_counter()
    with progress("profiling", steps) as on_step:
        evidence, call = collect(subject, steps, warmup, budget_s, restore, on_step)
    report = Profile(evidence, judge(evidence), subject, call)
    if measure:
        report.measure_safe(max(0.0, budget_s - (perf_counter() - start)))
    return report


def _check(
    step: object,
    model: nn.Module | None,
    optimizer: object,
    steps: int,
    warmup: int,
    budget_s: float,
) -> None:
    check_types(
        "profile",
        step=a_function(step),
        model=a_model(model, optional=True),
        optimizer=an_optimizer(optimizer, optional=True),
    )
    for name, module in model.named_modules() if model is not None else ():
        if any(map(is_lazy, module.parameters(recurse=False))):
            where = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(
                f"profile: model must have initialized parameters, got lazy ones in {where}: run a "
                "forward first"
            )
    check_whole("profile", "steps", steps)
    check_whole("profile", "warmup", warmup, 0)
    check_positive("profile", "budget_s", budget_s)


def _check_data(data: object, tokens: Any) -> None:
    fits = isinstance(data, Iterable) and not isinstance(data, Mapping | str | bytes)
    check_types("profile", data=(data, data is None or fits, "an iterable of batches"))
    if tokens is None:
        return
    if callable(tokens):
        if data is None:
            raise ValueError("profile: tokens must be an integer without data, got a function")
        return
    fits = isinstance(tokens, int) and not isinstance(tokens, bool)
    check_types("profile", tokens=(tokens, fits, "an integer, a function or None"))
    if tokens < 0:
        raise ValueError(f"profile: tokens must be at least 0, got {tokens}")
