"""What a family must show: goals beside what was measured, and whether they were met."""

from dataclasses import dataclass

import torch

from benchmarks.case import Case, Operation
from benchmarks.harness import COPY, Result
from fusedops.measure import Ratio

OURS = "fusedops"
LAUNCHES = "launches"


@dataclass(frozen=True)
class Goal:
    """`fusedops` is to be at_least[allocator] times as fast as `over`, and reach `of_copy`."""

    operation: Operation
    mode: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    over: str
    at_least: dict[str, float]
    of_copy: float | None = None

    def case(self) -> Case:
        return Case(self.operation, self.mode, self.dtype, self.shape, only=(self.over, OURS))

    def verdicts(self, result: Result, allocator: str) -> list[dict]:
        """Asked, measured and met, one for each thing that the goal asks."""
        title = f"{self.case().title}, {allocator} allocator"
        measured = result.ratio(self.over, OURS)
        verdicts = [_verdict(title, f"over {self.over}", self.at_least[allocator], measured)]
        if self.of_copy is not None:
            verdicts.append(_verdict(title, "of copy", self.of_copy, result.ratio(COPY, OURS)))
        return verdicts


@dataclass(frozen=True)
class Ask:
    """Of a row on a GPU: `fusedops` is at_least[contender] times as fast (a copy is one of them).

    launches: how many kernels a call may launch.
    """

    case: Case
    at_least: dict[str, float]
    launches: int | None = None

    def verdicts(self, result: Result) -> list[dict]:
        """Asked, measured and met, one for each thing that is asked; not measured is not met."""
        verdicts = [
            _verdict(self.case.title, f"over {name}", factor, result.ratio(name, OURS))
            for name, factor in self.at_least.items()
        ]
        if self.launches is not None:
            found = result.launches.get(OURS)
            met = found is not None and found <= self.launches
            row = {"title": self.case.title, "what": LAUNCHES, "asked": self.launches}
            verdicts.append(row | {"measured": found, "met": met})
        return verdicts


def _verdict(title: str, what: str, asked: float, measured: Ratio | None) -> dict:
    met = measured is not None and measured.median >= asked
    return {"title": title, "what": what, "asked": asked, "measured": measured, "met": met}


def table(verdicts: list[dict]) -> str:
    """asked | measured with its 95 % interval | met, one line a verdict."""
    lines = [f"{'row':<88}{'asked':>7}  {'measured':<22}met"]
    for v in verdicts:
        row, met = f"{v['title']}, {v['what']}", "yes" if v["met"] else "NO"
        asked = str(v["asked"]) if v["what"] == LAUNCHES else f"{v['asked']:.4g}x"
        lines.append(f"{row:<88}{asked:>7}  {_shown(v['measured']):<22}{met}")
    return "\n".join(lines)


def _shown(measured: Ratio | int | None) -> str:
    if measured is None:
        return "not timed"
    return str(measured) if isinstance(measured, int) else str(Ratio(*measured))
