"""Advice: a suggested change to a step, and what it saves."""

from dataclasses import dataclass
from statistics import fmean, median

from fusedops.measuring.blocks import fewest_seconds, ratio_of
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import THRESHOLDS, Verdict
from fusedops.profiling.shares import computing_seconds

__all__ = [
    "WATCHED",
    "Advice",
    "Saving",
    "around_optimizer",
    "full_step",
    "limits",
    "optimizer_step",
    "saving",
    "step",
    "trial_seconds",
]

WATCHED = 10  # two steps whose memory is watched, and one before each, take less than so many


@dataclass(frozen=True)
class Saving:
    """What a change saves of a step.

    seconds: less time, negative where it is slower. bytes: less memory. interval: of the seconds,
    95 %; a prediction has none. step: seconds of the step without the change, in the experiment
    that measured the saving. None stands for what is not known.
    """

    seconds: float | None = None
    bytes: int | None = None
    interval: tuple[float, float] | None = None
    step: float | None = None


@dataclass(frozen=True)
class Advice:
    """One change that may help.

    why: what was seen. how: the change, as code where it is short. risk: what it costs or changes.
    formula: how the saving was predicted. measured: by `Profile.measure`; None before, and where
    it could not be measured.
    """

    id: str
    title: str
    why: str
    how: str
    risk: str
    formula: str = ""
    predicted: Saving | None = None
    measured: Saving | None = None

    @property
    def gain(self) -> float:
        """Seconds that order advice: measured if they are, else predicted."""
        for saving in (self.measured, self.predicted):
            if saving is not None and saving.seconds is not None:
                return saving.seconds
        return 0.0


def saving(without: list[float], changed: list[float], bytes_saved: int | None = None) -> Saving:
    """What a change saves of a step, with the 95 % interval of the paired ratio."""
    base = median(without)
    ratio = ratio_of(without, changed)
    low, middle, high = (base * (1 - 1 / r) for r in (ratio.low, ratio.median, ratio.high))
    return Saving(seconds=middle, bytes=bytes_saved, interval=(low, high), step=base)


def limits(verdict: Verdict, bound: str) -> bool:
    """Whether a bound reaches its threshold, also where the verdict names a larger one."""
    return bound in verdict.bounds or verdict.shares[bound][0] >= THRESHOLDS[bound]


def step(evidence: Evidence) -> float:
    """Seconds of a step on kept batches; of a loop's own step, what it does not wait for data."""
    if evidence.cached is not None and not evidence.recorded:
        return median(evidence.cached.running)
    return computing_seconds(evidence)


def full_step(evidence: Evidence) -> float:
    """Seconds of a step with the fetch of its batch."""
    return median(evidence.plain.running)


def optimizer_step(evidence: Evidence) -> float:
    """Mean seconds in the optimizer's step, without other programs' part; 0 if it was not seen.

    The mean, because gradient accumulation steps the optimizer once in several steps.
    """
    run = evidence.base
    parts = zip(run.optimizer, run.running, run.seconds, strict=False)
    return fmean([o * r / s for o, r, s in parts] or [0.0])


def around_optimizer(evidence: Evidence) -> float:
    """Seconds of a step without the optimizer's."""
    return max(0.0, step(evidence) - optimizer_step(evidence))


def trial_seconds(evidence: Evidence) -> float:
    """How long `Profile.measure` takes at least for a change, if the step stays as fast."""
    seconds = median((evidence.cached or evidence.plain).seconds)
    return fewest_seconds(seconds) + WATCHED * seconds
