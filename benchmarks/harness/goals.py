"""Compares an operator's measurements with its performance goals."""

from dataclasses import dataclass

import torch

from benchmarks.harness import report
from benchmarks.harness.case import Case, Operation
from benchmarks.harness.run import COPY, Result
from fusedops.measuring.ratios import Ratio, spread

OURS = "fusedops"
SHARE, MS = "share", "ms"
SMALLEST_COSINE, MEAN_COSINE = "smallest cosine", "mean cosine"
ABSOLUTE = (SHARE, MS, SMALLEST_COSINE, MEAN_COSINE)


@dataclass(frozen=True)
class Goal:
    """`fusedops` should be at_least[allocator] times as fast as `over`, and reach `of_copy`.

    of_memory: the largest fraction of `over`'s peak memory that it may use. The allocator does not
    affect this, so it is checked under the default one. ms: how long a call may take.
    """

    operation: Operation
    mode: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    over: str
    at_least: dict[str, float]
    of_copy: float | None = None
    of_memory: float | None = None
    ms: float | None = None

    def case(self) -> Case:
        return Case(self.operation, self.mode, self.dtype, self.shape, only=(self.over, OURS))

    def verdicts(self, result: Result, allocator: str) -> list[dict]:
        """(goal, measured, met) for each part of the goal."""
        title = f"{self.case().title}, {allocator} allocator"
        ratio = result.ratio(self.over, OURS)
        verdicts = [report.goal(title, f"over {self.over}", self.at_least[allocator], ratio)]
        if self.of_copy is not None:
            copied = result.ratio(COPY, OURS)
            verdicts.append(report.goal(title, "of copy", self.of_copy, copied))
        if self.of_memory is not None and allocator == "default":
            both = self.over in result.memory and OURS in result.memory
            share = result.memory[OURS].peak / result.memory[self.over].peak if both else None
            what = f"memory, of {self.over}'s"
            verdicts.append(report.goal(title, what, self.of_memory, share, at_most=True))
        if self.ms is not None:
            verdicts.append(report.goal(title, MS, self.ms, _milliseconds(result), at_most=True))
        return verdicts


def _milliseconds(result: Result) -> float | None:
    times = result.seconds.get(OURS)
    return spread(times).median * 1e3 if times else None


def table(verdicts: list[dict]) -> str:
    """goal | measured with its 95 % interval | met, one line per verdict."""
    lines = [f"{'row':<88}{'asked':>7}  {'measured':<22}met"]
    for v in verdicts:
        row, met = f"{v['title']}, {v['what']}", "yes" if v["met"] else "NO"
        asked = f"{v['asked']:.4g}" + ("" if v["what"] in ABSOLUTE else "x")
        lines.append(f"{row:<88}{asked:>7}  {_shown(v['measured']):<22}{met}")
    return "\n".join(lines)


def _shown(measured: Ratio | float | None) -> str:
    if measured is None:
        return "not timed"
    return f"{measured:.4g}" if isinstance(measured, (int, float)) else str(Ratio(*measured))
