"""Computes a step's seconds, with or without fetch and optimizer, for the advice rules."""

from statistics import fmean, median

from fusedops.measuring.blocks import fewest_seconds
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.shares import computing_seconds

__all__ = ["WATCHED", "around_optimizer", "full_step", "optimizer_step", "step", "trial_seconds"]

WATCHED = 10  # two steps whose memory is watched, and one before each, take less than so many


def step(evidence: Evidence) -> float:
    """Seconds of a step on kept batches; if none were kept, of one less its wait for data."""
    if evidence.cached is not None:
        return median(evidence.cached.running)
    return computing_seconds(evidence)


def full_step(evidence: Evidence) -> float:
    """Seconds of a step with the fetch of its batch."""
    return median(evidence.plain.running)


def optimizer_step(evidence: Evidence) -> float:
    """Mean seconds in the optimizer's step, without other programs' part; 0 if it was not seen.

    The mean, because gradient accumulation steps the optimizer once in several steps.
    """
    run = evidence.cached or evidence.plain
    parts = zip(run.optimizer, run.running, run.seconds, strict=False)
    return fmean([o * r / s for o, r, s in parts] or [0.0])


def around_optimizer(evidence: Evidence) -> float:
    """Seconds of a step without the optimizer's."""
    return max(0.0, step(evidence) - optimizer_step(evidence))


def trial_seconds(evidence: Evidence) -> float:
    """How long `Profile.measure` takes at least for a change, if the step stays as fast."""
    seconds = median((evidence.cached or evidence.plain).seconds)
    return fewest_seconds(seconds) + WATCHED * seconds
