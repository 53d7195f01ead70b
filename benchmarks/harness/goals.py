"""Compares an operator's measurements with its performance goals."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.harness.case import Case, Operation
from benchmarks.harness.run import COPY, Result
from fusedops.measuring.ratios import Ratio, spread

OURS = "fusedops"
LAUNCHES, MS, TFLOP_PER_S, BESIDE = "launches", "ms", "TFLOP/s", "bytes beside the results"
SMALLEST_COSINE, MEAN_COSINE = "smallest cosine", "mean cosine"
SECONDS, SHARE = "seconds", "share"
AT_MOST = (LAUNCHES, MS, BESIDE)
ABSOLUTE = (SECONDS, SHARE, LAUNCHES, MS, TFLOP_PER_S, BESIDE, SMALLEST_COSINE, MEAN_COSINE)


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
        measured = result.ratio(self.over, OURS)
        verdicts = [_verdict(title, f"over {self.over}", self.at_least[allocator], measured)]
        if self.of_copy is not None:
            verdicts.append(_verdict(title, "of copy", self.of_copy, result.ratio(COPY, OURS)))
        if self.of_memory is not None and allocator == "default":
            both = self.over in result.memory and OURS in result.memory
            share = result.memory[OURS].peak / result.memory[self.over].peak if both else None
            what = f"memory, of {self.over}'s"
            verdicts.append(_limit(title, what, self.of_memory, share, operator.le))
        if self.ms is not None:
            verdicts.append(_limit(title, MS, self.ms, _milliseconds(result), operator.le))
        return verdicts


@dataclass(frozen=True)
class GpuGoal:
    """A GPU row's goal: `fusedops` is at_least[contender] times as fast (including a copy).

    launches: the most kernels that a call may launch. ms: how long it may take. tflop_per_s: what
    it must reach. beside: the most bytes that it may hold in addition to its results.
    """

    case: Case
    at_least: dict[str, float]
    launches: int | None = None
    ms: float | None = None
    tflop_per_s: float | None = None
    beside: int | None = None

    def verdicts(self, result: Result) -> list[dict]:
        """(goal, measured, met) for each part; not measured means not met.

        `met` is None for a rival that is not installed: that goal is neither met nor missed.
        """
        verdicts = [
            _verdict(self.case.title, f"over {name}", factor, result.ratio(name, OURS))
            | ({"met": None} if name in result.absent else {})
            for name, factor in self.at_least.items()
        ]
        return verdicts + [
            _limit(self.case.title, what, asked, found, holds)
            for what, asked, found, holds in self._limits(result)
            if asked is not None
        ]

    def _limits(self, result: Result) -> list[tuple]:
        """(what, goal, measured, and how they must compare)."""
        ms, memory = _milliseconds(result), result.memory.get(OURS)
        reached = result.flops / ms / 1e9 if result.flops and ms else None
        return [
            (LAUNCHES, self.launches, result.launches.get(OURS), operator.le),
            (MS, self.ms, ms, operator.le),
            (TFLOP_PER_S, self.tflop_per_s, reached, operator.ge),
            (BESIDE, self.beside, memory and memory.beside, operator.le),
        ]


def _milliseconds(result: Result) -> float | None:
    times = result.seconds.get(OURS)
    return spread(times).median * 1e3 if times else None


def _verdict(title: str, what: str, asked: float, measured: Ratio | None) -> dict:
    met = measured is not None and measured.median >= asked
    return {"title": title, "what": what, "asked": asked, "measured": measured, "met": met}


def _limit(
    title: str,
    what: str,
    asked: float,
    measured: float | None,
    holds: Callable[[float, float], bool],
) -> dict:
    met = measured is not None and holds(measured, asked)
    return {"title": title, "what": what, "asked": asked, "measured": measured, "met": met}


def shortfall(verdict: dict) -> float:
    """What was measured over what was asked; below 1 for a missed goal."""
    measured, asked = verdict["measured"], verdict["asked"]
    found = measured if isinstance(measured, (int, float)) else measured[0]
    return asked / found if verdict["what"] in AT_MOST else found / asked


def missed(verdicts: Iterable[dict]) -> list[dict]:
    return [verdict for verdict in verdicts if verdict["met"] is False]


def table(verdicts: list[dict]) -> str:
    """goal | measured with its 95 % interval | met, one line per verdict."""
    lines = [f"{'row':<88}{'asked':>7}  {'measured':<22}met"]
    for v in verdicts:
        row, met = f"{v['title']}, {v['what']}", {True: "yes", False: "NO", None: "-"}[v["met"]]
        asked = f"{v['asked']:.4g}" + ("" if v["what"] in ABSOLUTE else "x")
        lines.append(f"{row:<88}{asked:>7}  {_shown(v['measured'], v['met']):<22}{met}")
    return "\n".join(lines)


def _shown(measured: Ratio | float | None, met: bool | None) -> str:
    if measured is None:
        return "not installed" if met is None else "not timed"
    return f"{measured:.4g}" if isinstance(measured, (int, float)) else str(Ratio(*measured))
