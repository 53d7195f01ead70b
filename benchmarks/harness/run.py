"""Runs one case: makes the inputs, refuses what is wrong, times the rest beside a copy."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.harness.case import (
    Case,
    Contender,
    Run,
    Skip,
    bind,
    grad_mode,
    in_turn,
    with_inputs,
)
from benchmarks.harness.expected import Answers, fault, leaves
from benchmarks.harness.memory import Memory
from benchmarks.harness.timing import Call, Clock, Machine, Timed, interleaved
from fusedops.profiling.timing import Ratio, paired_ratio
from fusedops.testing import poisoned

try:
    from triton.errors import TritonError
except ModuleNotFoundError:
    TritonError = RuntimeError

COPY = "copy"
DRAWS, LUCK = 8, 5
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
    memory: dict[str, Memory] = field(default_factory=dict)
    flops: int | None = None

    def ratio(self, base: str, contender: str) -> Ratio | None:
        """How many times faster than `base`; None where one of the two was not timed."""
        if base not in self.seconds or contender not in self.seconds:
            return None
        return paired_ratio(self.seconds[base], self.seconds[contender])

    def wrong(self) -> bool:
        """Whether a kernel of ours was refused."""
        return any(is_ours(name) for name in self.refused)


class Others(NamedTuple):
    """Inputs and gradients of the outputs that take turns with those of the answers."""

    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]


def is_ours(contender: str) -> bool:
    return contender.startswith("fusedops")


def run_case(case: Case, budget_s: float, machine: Machine, copy: bool = True) -> Result:
    """Checks every contender of `case`, then times those that are right, interleaved.

    Where the device has too little memory for the row, all are skipped.
    """
    result = Result(case, 0)
    try:
        _measure(result, budget_s, machine, copy)
    except torch.OutOfMemoryError as error:
        told = result.skipped | result.refused
        left = [name for name in case.contenders() if name not in told]
        result.skipped |= dict.fromkeys(left, f"too little memory for the row: {_line(error)}")
    return result


def count_launches(case: Case, machine: Machine) -> dict[str, int]:
    """What a forward call of each contender of ours that runs puts on the device.

    Not in a process that times: a profiler that has run may slow every later launch.
    """
    inputs = case.operation.inputs(case.shape, case.dtype, machine.device)
    found = {}
    for name, contender in case.contenders().items():
        try:
            if is_ours(name):
                with contender.scope(), grad_mode(case.mode):
                    found[name] = machine.launches(contender.prepare(*inputs))
        except (Skip, *RAISED):
            continue  # the timing says why
    return found


def weigh(case: Case, name: str, machine: Machine) -> Memory | None:
    """The memory of a call of one contender, whose output is a loss; None where it cannot run.

    Not in a process that times: see `count_launches`.
    """
    contender = case.operation.contenders[name]
    try:
        inputs = case.operation.inputs(case.shape, case.dtype, machine.device)
        with contender.scope(), grad_mode(case.mode):
            return machine.memory(bind(contender.prepare(*inputs), case.mode, leaves(inputs)))
    except (Skip, *RAISED):
        return None


def _measure(result: Result, budget_s: float, machine: Machine, copy: bool) -> None:
    case, clock, timed = result.case, machine.clocks[result.case.clock], dict[str, Timed]()
    torch.manual_seed(0)
    inputs = case.operation.inputs(case.shape, case.dtype, machine.device)
    result.bytes_moved = case.operation.bytes_moved(case.mode, *inputs)
    if case.operation.flops is not None:
        result.flops = case.operation.flops(case.mode, *inputs)
    answers = Answers(case.operation.reference, case.mode, inputs, rows=case.operation.rows)
    others = _others(case, answers) if case.clock == "device" else None
    if copy:
        copies = [copy_of(result.bytes_moved, machine.device) for _ in range(2 if others else 1)]
        timed[COPY] = (in_turn(*copies), nullcontext)
    for name, contender in case.contenders().items():
        admitted = _admit(name, contender, answers, others, result, clock)
        if admitted:
            timed[name] = admitted
    with grad_mode(case.mode):
        result.seconds = interleaved(timed, budget_s, clock)


def _others(case: Case, answers: Answers) -> Others:
    inputs = _fresh_inputs(case, answers)
    return Others(inputs, tuple(torch.randn_like(grad) for grad in answers.grads))


def _fresh_inputs(case: Case, answers: Answers) -> tuple[Tensor, ...]:
    """Beside the same parameters, which a contender may have put into a module."""
    fresh = case.operation.inputs(case.shape, case.dtype, answers.inputs[0].device)
    pairs = zip(answers.inputs, fresh, strict=True)
    return tuple(a if isinstance(a, Parameter) else b for a, b in pairs)


def _call(run: Run, answers: Answers, others: Others | None) -> Call:
    """What is timed: of one set of inputs, or of two in turn."""
    call = bind(run, answers.mode, answers.leaves, begun(answers.grads))
    if others is None:
        return call
    other = with_inputs(run, answers.inputs, others.inputs)
    return in_turn(call, bind(other, answers.mode, leaves(others.inputs), begun(others.grads)))


def begun(grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A loss's gradient is 1, as `loss.backward()` has it: it was checked with another."""
    return tuple(grad if grad.dim() else torch.ones_like(grad) for grad in grads)


def _admit(
    name: str,
    contender: Contender,
    answers: Answers,
    others: Others | None,
    result: Result,
    clock: Clock,
) -> Timed | None:
    """What to time of a contender; why not, or what is inexact, goes into `result`."""
    try:
        run = contender.prepare(*answers.inputs)
        with contender.scope(), poisoned() if is_ours(name) else nullcontext():
            found = _fault(run, answers, result.case) if contender.checked else None
        with contender.scope(), grad_mode(answers.mode):
            call = _call(run, answers, others)
            clock(call)(1)  # a graph may refuse to hold it
    except Skip as reason:
        result.skipped[name] = str(reason)
        return None
    except RAISED as error:
        result.refused[name] = f"raised {type(error).__name__}: {_line(error)}"
        return None
    if found and is_ours(name):
        result.refused[name] = found
        return None
    if found:
        result.inexact[name] = found
    return call, contender.scope


def _fault(run: Run, answers: Answers, case: Case) -> str | None:
    """The first result of `run` that errs too much, or None.

    Where one draw of the inputs refuses it, the mean over DRAWS decides, and in no draw may a row
    err more than LUCK times as much as eager's. The largest error of a row is luck: a float32
    product that sums 64 terms in one chain errs 1.36 times as much as one of two chains in the RMS
    norm. In the max norm of one draw, 4 of 100 rows of 1024 err more than twice as much, others at
    each draw and 3.7 times at most; in the mean of eight draws none does.
    """
    judged = [answers.errors(run)]
    if fault(judged) is None:
        return None
    for seed in range(1, DRAWS):
        drawn = _drawn(case, answers, seed)
        judged.append(drawn.errors(with_inputs(run, answers.inputs, drawn.inputs)))
    single = (fault([draw], LUCK) for draw in judged)
    return next(filter(None, single), fault(judged))


def _drawn(case: Case, answers: Answers, seed: int) -> Answers:
    device = answers.inputs[0].device
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        inputs = _fresh_inputs(case, answers)
        return Answers(case.operation.reference, case.mode, inputs, seed, case.operation.rows)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def copy_of(bytes_moved: int, device: torch.device) -> Call:
    """A copy that reads and writes `bytes_moved` in all, between buffers whose pages are mapped."""
    source = torch.rand(max(1, bytes_moved // 8), device=device)  # float32: 4 bytes in, 4 out
    target = torch.ones_like(source)
    return lambda: target.copy_(source)
