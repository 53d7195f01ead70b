"""What a family must show: goals beside what was measured, and whether they were met."""

from dataclasses import dataclass

import torch

from benchmarks.case import Case, Operation
from benchmarks.harness import COPY, Result
from fusedops.measure import Ratio

OURS = "fusedops"


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


def _verdict(title: str, what: str, asked: float, measured: Ratio | None) -> dict:
    met = measured is not None and measured.median >= asked
    return {"row": title, "what": what, "asked": asked, "measured": measured, "met": met}


def table(verdicts: list[dict]) -> str:
    """asked | measured with its 95 % interval | met, one line a verdict."""
    lines = [f"{'row':<88}{'asked':>7}  {'measured':<22}met"]
    for v in verdicts:
        measured = str(Ratio(*v["measured"])) if v["measured"] else "not timed"
        row = f"{v['row']}, {v['what']}"
        lines.append(f"{row:<88}{v['asked']:>6.1f}x  {measured:<22}{'yes' if v['met'] else 'NO'}")
    return "\n".join(lines)
