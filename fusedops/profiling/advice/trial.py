"""Tries one change on the live step, measures its saving of time and memory, and undoes it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

from fusedops.profiling.advice.advice import Saving
from fusedops.profiling.advice.experiment import TooSlow, compare_blocks, fewest_seconds, saving
from fusedops.profiling.advice.knobs import KNOBS, SAME_MEMORY
from fusedops.profiling.collect.everything import Subject
from fusedops.profiling.collect.gpu.driver import Driver
from fusedops.profiling.collect.state import Snapshot
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.storage.measured import measure_memory

__all__ = ["tried"]

WATCHED = 10  # two steps whose memory is watched, and one before each, take less than so many


def tried(
    name: str, subject: Subject, evidence: Evidence, call: Callable[[], Any], budget_s: float
) -> tuple[Saving | None, str]:
    """What a change saves, or None and the reason. Everything is put back."""
    step = median((evidence.cached or evidence.plain).seconds)
    watched = 0.0 if name in SAME_MEMORY else WATCHED * step
    if fewest_seconds(step) + watched > budget_s:
        return None, "the budget had no time for it"
    change = partial(KNOBS[name], subject)
    kept = Snapshot(subject.model, subject.optimizer)
    try:
        blocks = compare_blocks(call, change, budget_s - watched)
        kept.restore()
        saved = None if name in SAME_MEMORY else _bytes(subject, evidence, call, change)
        return saving(*blocks, saved), ""
    except TooSlow as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001  the user's step, under a change
        return None, f"the step raised {type(error).__name__}: {error}"
    finally:
        kept.restore()


def _bytes(
    subject: Subject, evidence: Evidence, call: Callable[[], Any], change: Callable[[], Any]
) -> int | None:
    """How much lower a step's peak is with the change; None where it cannot be measured."""
    try:
        before, after = (_peak(subject, evidence, call, way) for way in (nullcontext, change))
    except Exception:  # noqa: BLE001  the user's step, under hooks and a profiler
        return None
    return before - after


def _peak(
    subject: Subject, evidence: Evidence, call: Callable[[], Any], way: Callable[[], Any]
) -> int:
    """Bytes of a step's peak, after one that makes the optimizer's state."""
    with way():
        call()
        optimizer = subject.optimizer
        # A change may let another optimizer step. Then the memory of the user's does not count.
        stepping = getattr(getattr(optimizer, "step", None), "__self__", optimizer)
        driver = Driver(index=subject.device_index) if evidence.gpu is not None else None
        use = measure_memory(call, model=subject.model, optimizer=stepping, driver=driver)
        return use.peak
