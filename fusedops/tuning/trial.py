"""`Trial` and `Tuning`: the measured effect of each change, and the best setting."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusedops.measuring.ratios import Ratio
from fusedops.measuring.units import bytes_text, seconds_text
from fusedops.tuning.rules import MeasuredSetting
from fusedops.tuning.setting import Setting

__all__ = ["Trial", "Tuning"]


@dataclass(frozen=True)
class Trial:
    """One knob turned on top of what was kept before it.

    found: its step; None if the knob was not tried. ratio: how many times as many samples a second
    as without it (goal "latency": how many times shorter a step), paired by turns, with its 95 %
    interval. loss: of the last of a few steps from the user's parameters; baseline_loss: of the
    same steps and batches in the baseline. results: how it changes results. kept: whether later
    trials build on it. why: the reason, also for not trying.
    """

    knob: str
    setting: Setting
    found: MeasuredSetting | None = None
    ratio: Ratio | None = None
    loss: float | None = None
    baseline_loss: float | None = None
    results: str = ""
    kept: bool = False
    why: str = ""

    @property
    def measured(self) -> MeasuredSetting:
        """What was measured. Raises ValueError if the knob was not tried."""
        if self.found is None:
            raise ValueError(f"tune: {self.knob} was not tried: {self.why}")
        return self.found

    def __str__(self) -> str:
        if self.found is None:
            return f"  {self.knob:14} not tried: {self.why}"
        mark, ratio = "*" if self.kept else " ", str(self.ratio or "")
        seconds, peak = seconds_text(self.found.seconds), bytes_text(self.found.peak_bytes)
        numbers = f"{seconds:>8}  {ratio:20}  {peak:>9}  loss {self.loss:.4f}"
        results = f"; {self.results}" if self.results else ""
        return f"{mark} {self.knob:14} {numbers}  {self.why}{results}"


@dataclass(frozen=True)
class Tuning:
    """What `fusedops.tune` found. trials: in their order, the baseline first.

    best: the setting that won. ratio: of it to the baseline, measured in turns at the end, as in
    `Trial`. code: Python that sets the winner up. enough_s: a budget_s that has time for all
    trials, about; None if this one had.
    """

    trials: tuple[Trial, ...]
    best: Setting
    ratio: Ratio
    goal: str
    about: dict[str, Any]
    enough_s: int | None = None

    @property
    def code(self) -> str:
        return f"{self.best.feeding()}\n{self.best.code}"

    def __str__(self) -> str:
        base, measured = self.trials[0], self.trials[0].measured
        p95 = "" if measured.p95 is None else f", p95 {seconds_text(measured.p95)}"
        lines = [
            f"baseline: batch {base.setting.batch}, {seconds_text(measured.seconds)} a step{p95}, "
            f"peak {bytes_text(measured.peak_bytes)}, loss {base.loss:.4f} after a few steps",
            f"* kept, for {self.goal}; a ratio compares with what was kept before",
            *map(str, self.trials[1:]),
            *self._result(),
            "",
            self.code,
        ]
        return "\n".join(lines)

    def _result(self) -> Iterator[str]:
        if self.enough_s is not None:
            yield f"budget_s={self.enough_s} (--budget {self.enough_s}) has time for all of them"
        if any(trial.found for trial in self.trials[1:]) or self.enough_s is None:
            yield f"best: {self.ratio} of the baseline's {self.goal}"
        else:
            yield "nothing was tried"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self) | {"code": self.code, "ratio": list(self.ratio)}
        for trial in values["trials"]:
            trial["ratio"] = None if trial["ratio"] is None else list(trial["ratio"])
        return values

    def save(self, path: str | Path) -> None:
        """Writes `to_dict()` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")
