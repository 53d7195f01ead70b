"""`fusedops.tune`: measures a baseline, one change after another, and the best setting."""

import math
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fusedops.measuring.arguments import (
    a_function,
    a_model,
    an_optimizer,
    check_on_cpu,
    check_one_of,
    check_positive,
    check_types,
    check_whole,
)
from fusedops.measuring.environment import environment
from fusedops.measuring.progress import progress
from fusedops.measuring.snapshot import Snapshot
from fusedops.tuning.knobs import KNOBS, TunedStep
from fusedops.tuning.rules import GOALS, Limits
from fusedops.tuning.setting import Setting
from fusedops.tuning.trial import Tuning
from fusedops.tuning.tuner import Tuner

__all__ = ["tune"]

LAST_PART = 0.2  # of the budget: the winner against the baseline


def tune(
    make_batch: Callable[[int, int | None], Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: int,
    length: int | None = None,
    goal: str = "throughput",
    p95: float | None = None,
    memory: int | None = None,
    knobs: Iterable[str] | None = None,
    budget_s: float = 600.0,
) -> Tuning:
    """Finds settings that make a training step faster, one knob after the other.

    make_batch(batch, length): gives the model's keyword arguments, labels included. batch: samples
    of an optimizer step. model: on the CPU. goal: "throughput" (samples a second) or "latency"
    (seconds of a step). p95: seconds that a step may take in 95 % of steps. memory: bytes that a
    step may hold at its peak. A step over a limit is brought under it first; for p95 by smaller
    batches, if nothing else is enough. knobs: names of `KNOBS`, in the order to try them; by
    default all, those with the largest expected gain first. budget_s: seconds for everything.

    Each knob is compared with what was kept before, in turns; what is faster beyond the 95 %
    interval is kept. Every trial says how it changes results, and its loss after a few steps. The
    setting that wins is compared with the baseline again. The code that is printed is the code that
    was measured.

    Afterwards model, optimizer, threads and the default random generators are what they were.
    Raises ValueError or TypeError for arguments that it cannot use.
    """
    names = list(KNOBS) if knobs is None else [knobs] if isinstance(knobs, str) else list(knobs)
    check_types(
        "tune",
        make_batch=a_function(make_batch, "a function of batch and length"),
        model=a_model(model),
        optimizer=an_optimizer(optimizer),
        memory=(memory, isinstance(memory, int | None), "bytes as an integer, or None"),
    )
    check_on_cpu("tune", model)
    check_whole("tune", "batch", batch)
    check_one_of("tune", "goal", goal, GOALS)
    check_positive("tune", "budget_s", budget_s)
    if p95 is not None:
        check_positive("tune", "p95", p95)
    if memory is not None:
        check_positive("tune", "memory", memory, "bytes")
    for name in names:
        if name not in KNOBS:
            raise ValueError(f"tune: knobs must be among {', '.join(KNOBS)}, got {name!r}")
    start = perf_counter()
    tuner = Tuner(
        TunedStep(model, optimizer, limited=memory is not None),
        make_batch,
        length,
        goal,
        Limits(p95, memory),
        start + (1 - LAST_PART) * budget_s,
        start + budget_s,
        len(names),
        sorts=knobs is None,
    )
    kept, trials = Snapshot(model, optimizer), []
    with kept, progress("tuning", len(names) + 2) as on_trial:
        for trial in tuner.trials(Setting(batch), names, kept):
            on_trial()
            trials.append(trial)
        enough = _enough(perf_counter() - start + tuner.missing) if tuner.missing else None
        kept_trials = [trial for trial in trials if trial.kept]
        ratio = tuner.final(kept_trials)
    about = environment(torch.get_num_threads(), torch.device("cpu"))
    about |= {"model": type(model).__name__}
    return Tuning(tuple(trials), kept_trials[-1].setting, ratio, goal, about, enough)


def _enough(trials_s: float) -> int:
    """The budget with time for trials of so many seconds, rounded up."""
    return 10 * math.ceil(1.1 * trials_s / (1 - LAST_PART) / 10)
