"""Defines `Advice`, a suggested change, and `Saving`, its effect on a step."""

from dataclasses import dataclass, replace
from statistics import median

from fusedops.measuring.blocks import ratio_of

__all__ = ["Advice", "Saving", "saving"]


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

    def with_measured(self, saving: Saving | None) -> "Advice":
        return replace(self, measured=saving)

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
