"""Checks and times a benchmark case's implementations, and measures their launches and memory."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.harness.case import (
    Case,
    Contender,
    NotInstalled,
    Run,
    Skip,
    bind,
    grad_mode,
    in_turn,
    with_inputs,
)
from benchmarks.harness.expected import Answers, fault, leaves
from benchmarks.harness.memory import Memory, profiled
from benchmarks.harness.timing import Call, Clock, Machine, Timed, interleaved
from fusedops.measuring.ratios import Ratio, paired_ratio
from fusedops.testing import poisoned

try:
    from triton.errors import TritonError
except ModuleNotFoundError:
    TritonError = RuntimeError

COPY = "copy"
DRAWS, LUCK = 8, 5
# Errors for which a contender is refused, while the others are still timed.
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
    """seconds[contender][round]; `skipped` and `refused` give the others' reasons.

    `absent` has those of the skipped whose package is not installed.

    A peer that fails the yardstick is timed all the same, because people use it; `inexact` says by
    how much it fails. A kernel of ours that fails is refused.
    """

    case: Case
    bytes_moved: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    inexact: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    flops: int | None = None

    def ratio(self, base: str, contender: str) -> Ratio | None:
        """Returns the speedup over `base`; None if one of the two was not timed."""
        if base not in self.seconds or contender not in self.seconds:
            return None
        return paired_ratio(self.seconds[base], self.seconds[contender])

    def unexplained(self) -> list[str]:
        """Returns the contenders that were neither timed nor left out for a reason."""
        explained = self.seconds.keys() | self.skipped.keys() | self.refused.keys()
        return [name for name in self.case.contenders() if name not in explained]

    def wrong(self) -> bool:
        """Whether a kernel of ours was refused."""
        return any(is_ours(name) for name in self.refused)


class Others(NamedTuple):
    """A second set of inputs and output gradients, which alternates with the answers'."""

    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]


def is_ours(contender: str) -> bool:
    return contender.startswith("fusedops")


def run_case(case: Case, budget_s: float, machine: Machine, copy: bool = True) -> Result:
    """Checks the contenders of `case`, then times those not refused or skipped, interleaved.

    If the device has too little memory for the row, all are skipped. If a call raises only while it
    is timed, all are refused: it may have been any of them. What the reference raises is raised.
    """
    result = Result(case, 0)
    try:
        _measure(result, budget_s, machine, copy)
    except torch.OutOfMemoryError as error:
        result.skipped |= dict.fromkeys(
            result.unexplained(), f"too little memory for the row: {_line(error)}"
        )
    return result


def measure_memory(case: Case, name: str, machine: Machine) -> Memory | None:
    """Memory of a contender's call; None if it cannot run. Outputs are summed up to a loss.

    This must run in a process that does not time: a profiler may slow down later calls.
    """
    contender = case.operation.contenders[name]
    try:
        inputs = case.operation.inputs(case.shape, case.dtype, machine.device)
        with contender.scope(), grad_mode(case.mode):
            run = partial(_loss, contender.prepare(*inputs))
            return profiled(bind(run, case.mode, leaves(inputs)))
    except (Skip, *RAISED):
        return None


def _loss(run: Run) -> Tensor:
    outputs = run()
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else outputs.sum()
    return torch.stack([o.sum() for o in outputs]).sum()


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
    try:
        with grad_mode(case.mode):
            result.seconds = interleaved(timed, budget_s, clock)
    except torch.OutOfMemoryError:
        raise
    except RAISED as error:
        reason = f"the row raised {type(error).__name__}: {_line(error)}"
        result.refused |= dict.fromkeys(result.unexplained(), reason)


def _others(case: Case, answers: Answers) -> Others:
    inputs = _fresh_inputs(case, answers)
    return Others(inputs, tuple(torch.randn_like(grad) for grad in answers.grads))


def _fresh_inputs(case: Case, answers: Answers) -> tuple[Tensor, ...]:
    """Keeps the same parameters, which a contender may have put into a module."""
    fresh = case.operation.inputs(case.shape, case.dtype, answers.inputs[0].device)
    pairs = zip(answers.inputs, fresh, strict=True)
    return tuple(a if isinstance(a, Parameter) else b for a, b in pairs)


def _call(run: Run, answers: Answers, others: Others | None) -> Call:
    """Returns the timed call: of one set of inputs, or alternating between two."""
    call = bind(run, answers.mode, answers.leaves, with_unit_loss(answers.grads))
    if others is None:
        return call
    other = with_inputs(run, answers.inputs, others.inputs)
    return in_turn(
        call, bind(other, answers.mode, leaves(others.inputs), with_unit_loss(others.grads))
    )


def with_unit_loss(grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sets a loss's gradient to 1, as in `loss.backward()`; it was checked with another one."""
    return tuple(grad if grad.dim() else torch.ones_like(grad) for grad in grads)


def _admit(
    name: str,
    contender: Contender,
    answers: Answers,
    others: Others | None,
    result: Result,
    clock: Clock,
) -> Timed | None:
    """Returns a contender's call to time; the reason why not, or its error, goes into `result`."""
    try:
        run = contender.prepare(*answers.inputs)
        with contender.scope(), poisoned() if is_ours(name) else nullcontext():
            fault = _fault(run, answers, result.case) if contender.checked else None
        with contender.scope(), grad_mode(answers.mode):
            call = _call(run, answers, others)
            clock(call)(1)  # it may be impossible to capture
    except Skip as reason:
        result.skipped[name] = str(reason)
        result.absent |= {name} if isinstance(reason, NotInstalled) else set()
        return None
    except RAISED as error:
        result.refused[name] = f"raised {type(error).__name__}: {_line(error)}"
        return None
    if fault and is_ours(name):
        result.refused[name] = fault
        return None
    if fault:
        result.inexact[name] = fault
    return call, contender.scope


def _fault(run: Run, answers: Answers, case: Case) -> str | None:
    """Returns the first result of `run` with too large an error, or None.

    If the first inputs fail, the mean over DRAWS random inputs decides, and no row's error may
    exceed LUCK times eager's in any of them. A row's largest error is chance. A float32 matmul that
    sums 64 terms in one chain has 1.36 times the RMS error of one with two chains. In the max norm
    of one draw, 4 of 100 rows of 1024 have more than twice the error: different ones in each draw,
    at most 3.7 times. In the mean of eight draws, no row has.
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
    """Returns a copy that reads and writes `bytes_moved` in total, between mapped buffers."""
    source = torch.rand(max(1, bytes_moved // 8), device=device)  # float32: 4 bytes in, 4 out
    target = torch.ones_like(source)
    return lambda: target.copy_(source)
