"""Tries one change on a live step, measures its savings, and undoes it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

from fusedops.measuring.alternate import TooSlow
from fusedops.measuring.blocks import FEWEST, SHORT, compare_blocks, fewest_seconds
from fusedops.measuring.changes import CHANGES, REPLACEMENTS, Target
from fusedops.measuring.clock import wall_seconds
from fusedops.measuring.driver import Driver
from fusedops.measuring.memory.measured import measure_memory
from fusedops.measuring.snapshot import Snapshot
from fusedops.measuring.units import seconds_text
from fusedops.profiling.advice.advice import WATCHED, Saving, saving
from fusedops.profiling.advice.loading import PREFETCHED, Loop, why_no_workers
from fusedops.profiling.advice.rules import useful_workers
from fusedops.profiling.collect.experiments import ProfiledStep
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.planning.step import blocks

__all__ = ["ALL", "ALL_SAFE", "needed_seconds", "tried", "why_not"]

LIVE = {name: change for name, change in CHANGES.items() if change.live is not None}
ALL = (*LIVE, "workers")
ALL_SAFE = (*(name for name, change in LIVE.items() if change.undone), "workers")

Call = Callable[[], Any]
Blocks = tuple[list[float], list[float]]


def why_not(name: str, subject: ProfiledStep, evidence: Evidence) -> str:
    """Why a change cannot be tried on this step; empty if it can."""
    if name == "workers":
        none = "" if useful_workers(evidence) else "no CPU is free for a worker"
        return why_no_workers(subject.data) or none
    target = _target(subject)
    if reason := LIVE[name].why_not(target):
        return reason
    if name == "checkpoint" and not target.blocks:
        return "the model has no list of blocks"
    if name in REPLACEMENTS and "step" in vars(subject.optimizer):
        return "the optimizer's step was replaced, for example by a scheduler"
    return ""


def _target(subject: ProfiledStep) -> Target:
    paths = [] if subject.model is None else [*blocks(subject.model)]
    return Target(subject.model, subject.optimizer, paths)


def needed_seconds(name: str, evidence: Evidence, pairs: int = FEWEST) -> float:
    """How long trying a change takes, about; for workers as long as the loop is their fill."""
    if name == "workers":
        untimed = 1 + PREFETCHED * useful_workers(evidence)
        return fewest_seconds(median(evidence.plain.seconds), untimed, pairs)
    step = median((evidence.cached or evidence.plain).seconds)
    watched = 0.0 if LIVE[name].same_memory else WATCHED * step
    return fewest_seconds(step, pairs=pairs) + watched


def tried(
    name: str, subject: ProfiledStep, evidence: Evidence, call: Call, budget_s: float
) -> tuple[Saving | None, str]:
    """What a change saves, or None and the reason. Everything is put back.

    A budget that is too small for the fewest pairs of blocks has half as many.
    """
    pairs = FEWEST if needed_seconds(name, evidence) <= budget_s else SHORT
    if needed_seconds(name, evidence, pairs) > budget_s:
        needed = seconds_text(needed_seconds(name, evidence))
        return None, f"the budget had no time, about {needed} are needed"
    with Snapshot(subject.model, subject.optimizer):
        try:
            if name == "workers":
                return saving(*_loop(subject, evidence, budget_s, pairs)), ""
            step = median((evidence.cached or evidence.plain).seconds)
            live, same_memory = LIVE[name].live, LIVE[name].same_memory
            watched = 0.0 if same_memory else WATCHED * step
            assert live is not None
            change = partial(live, _target(subject))
            timed = compare_blocks(call, change, budget_s - watched, pairs=pairs)
            saved = None if same_memory else _bytes(subject, evidence, call, change)
            return saving(*timed, saved), ""
        except TooSlow as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001  the user's step, under a change
            return None, f"the step raised {type(error).__name__}: {error}"


def _loop(subject: ProfiledStep, evidence: Evidence, budget_s: float, pairs: int) -> Blocks:
    """Blocks of the loop with its loader and with workers, which take CPUs from nobody else."""
    driver = _driver(subject, evidence)

    def step(batch: Any) -> None:
        subject.step(batch)
        if driver is not None:
            driver.synchronize()

    assert subject.data is not None
    loop = Loop(step, subject.data, useful_workers(evidence))  # type: ignore[arg-type]
    try:
        return compare_blocks(loop.once, loop.change, budget_s, loop.untimed, wall_seconds, pairs)
    finally:
        loop.close()


def _bytes(
    subject: ProfiledStep, evidence: Evidence, call: Call, change: Callable[[], Any]
) -> int | None:
    """How much lower a step's peak is with the change; None where it cannot be measured."""
    try:
        before, after = (
            _peak(subject, evidence, call, context) for context in (nullcontext, change)
        )
    except Exception:  # noqa: BLE001  the user's step, under hooks and a profiler
        return None
    return before - after


def _peak(subject: ProfiledStep, evidence: Evidence, call: Call, change: Callable[[], Any]) -> int:
    """Bytes of a step's peak, after one that makes the optimizer's state."""
    with change():
        call()
        optimizer = subject.optimizer
        # A change may let another optimizer step. Then the memory of the user's does not count.
        stepping = getattr(getattr(optimizer, "step", None), "__self__", optimizer)
        driver = _driver(subject, evidence)
        use = measure_memory(call, model=subject.model, optimizer=stepping, driver=driver)
        return use.peak


def _driver(subject: ProfiledStep, evidence: Evidence) -> Driver | None:
    """The driver of the step's GPU; None on a CPU."""
    return None if evidence.gpu is None else Driver(index=subject.device_index)
