"""Runs one case: makes the inputs, refuses what is wrong, times the rest beside a copy."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from benchmarks.answers import Answers
from benchmarks.case import Case, Contender, Skip, bind, grad_mode
from benchmarks.timing import Call, Clock, Machine, Timed, interleaved
from fusedops.measure import Ratio, paired_ratio
from fusedops.testing import poisoned

try:
    from triton.errors import TritonError
except ModuleNotFoundError:
    TritonError = RuntimeError

COPY = "copy"
# What a contender may raise and be refused for, so that the others are timed.
RAISED = (
    AssertionError,
    AttributeError,
    ImportError,
    RuntimeError,
    TritonError,
    TypeError,
    ValueError,
)


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
    launches: dict[str, int] = field(default_factory=dict)

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


def run_case(case: Case, budget_s: float, machine: Machine, copy: bool = True) -> Result:
    """Checks every contender of `case`, then times those that are right, interleaved."""
    torch.manual_seed(0)
    inputs = case.operation.inputs(case.shape, case.dtype, machine.device)
    answers = Answers(case.operation.reference, case.mode, inputs)
    result = Result(case, case.operation.bytes_moved(case.mode, *inputs))
    clock, timed = machine.clocks[case.clock], dict[str, Timed]()
    if copy:
        timed[COPY] = (copy_of(result.bytes_moved, machine.device), nullcontext)
    for name, contender in case.contenders().items():
        admitted = _admit(name, contender, answers, result, clock)
        if admitted:
            timed[name] = admitted
    with grad_mode(case.mode):
        result.seconds = interleaved(timed, budget_s, clock)
    return result


def count_launches(result: Result, machine: Machine) -> None:
    """Into `result`, what a forward call of each of ours that was timed puts on the device.

    Not while anything is still to be timed: a profiler that has run may slow every later launch.
    """
    case = result.case
    inputs = case.operation.inputs(case.shape, case.dtype, machine.device)
    for name, contender in case.contenders().items():
        if is_ours(name) and name in result.seconds:
            with contender.scope(), grad_mode(case.mode):
                result.launches[name] = machine.launches(contender.prepare(*inputs))


def _admit(
    name: str, contender: Contender, answers: Answers, result: Result, clock: Clock
) -> Timed | None:
    """What to time of a contender; why not, or what is inexact, goes into `result`."""
    try:
        run = contender.prepare(*answers.inputs)
        with contender.scope(), poisoned() if is_ours(name) else nullcontext():
            fault = answers.fault(run) if contender.checked else None
        with contender.scope(), grad_mode(answers.mode):
            call = bind(run, answers.mode, answers.leaves, answers.grads)
            clock(call)(1)  # a graph may refuse to hold it
    except Skip as reason:
        result.skipped[name] = str(reason)
        return None
    except RAISED as error:
        line = (str(error).splitlines() or ["no message"])[0]
        result.refused[name] = f"raised {type(error).__name__}: {line}"
        return None
    if fault and is_ours(name):
        result.refused[name] = fault
        return None
    if fault:
        result.inexact[name] = fault
    return call, contender.scope


def copy_of(bytes_moved: int, device: torch.device) -> Call:
    """A copy that reads and writes `bytes_moved` in all, between buffers whose pages are mapped."""
    source = torch.rand(max(1, bytes_moved // 8), device=device)  # float32: 4 bytes in, 4 out
    target = torch.ones_like(source)
    return lambda: target.copy_(source)
