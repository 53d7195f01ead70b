"""Runs one case: makes the inputs, refuses what is wrong, times the rest beside a copy."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from benchmarks.answers import Answers
from benchmarks.case import Case, Contender, Skip, bind, grad_mode
from benchmarks.timing import Timed, interleaved
from fusedops.measure import Ratio, paired_ratio
from fusedops.testing import poisoned

COPY = "copy"


@dataclass
class Result:
    """seconds[contender][round]; `skipped` and `refused` give the reasons of the others.

    A peer that is less exact than the yardstick asks is what people run: it is timed, and
    `inexact` says by how much. A kernel of ours is refused.
    """

    case: Case
    bytes_moved: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    inexact: dict[str, str] = field(default_factory=dict)

    def ratio(self, base: str, contender: str) -> Ratio | None:
        """How many times faster than `base`; None where one of the two was not timed."""
        if base not in self.seconds or contender not in self.seconds:
            return None
        return paired_ratio(self.seconds[base], self.seconds[contender])

    def wrong(self) -> bool:
        """Whether a kernel of ours was refused."""
        return any(is_ours(name) for name in self.refused)


def is_ours(contender: str) -> bool:
    return contender.startswith("fusedops")


def run_case(case: Case, budget_s: float, device: torch.device, copy: bool = True) -> Result:
    """Checks every contender of `case`, then times those that are right, interleaved."""
    torch.manual_seed(0)
    inputs = case.operation.inputs(case.shape, case.dtype, device)
    answers = Answers(case.operation.reference, case.mode, inputs)
    result = Result(case, case.operation.bytes_moved(case.mode, *inputs))
    timed: dict[str, Timed] = {}
    if copy:
        timed[COPY] = (_copy(result.bytes_moved, device), nullcontext)
    for name, contender in case.contenders().items():
        admitted = _admit(name, contender, answers, result)
        if admitted:
            timed[name] = admitted
    with grad_mode(case.mode):
        result.seconds = interleaved(timed, budget_s)
    return result


def _admit(name: str, contender: Contender, answers: Answers, result: Result) -> Timed | None:
    """What to time of a contender; why not, or what is inexact, goes into `result`."""
    try:
        run = contender.prepare(*answers.inputs)
        with contender.scope(), poisoned() if is_ours(name) else nullcontext():
            fault = answers.fault(run)
    except Skip as reason:
        result.skipped[name] = str(reason)
        return None
    except (RuntimeError, TypeError) as error:
        result.refused[name] = f"raised {type(error).__name__}: {str(error).splitlines()[0]}"
        return None
    if fault and is_ours(name):
        result.refused[name] = fault
        return None
    if fault:
        result.inexact[name] = fault
    return bind(run, answers.mode, answers.leaves, answers.grads), contender.scope


def _copy(bytes_moved: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes `bytes_moved` in all, between buffers whose pages are mapped."""
    source = torch.ones(max(1, bytes_moved // 8), device=device)  # float32: 4 bytes in, 4 out
    target = torch.ones_like(source)
    return lambda: target.copy_(source)
