"""Records the operators of one step of a loop that nobody can run again."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedops.patching.core.swap import observer
from fusedops.profiling.collect.forwards import Forwards, around, class_name, is_compiled
from fusedops.profiling.collect.modules import Modules
from fusedops.profiling.collect.operators import Recorder, rows
from fusedops.profiling.evidence import Op, Profiled

__all__ = ["RecordedStep"]

FAR = 2**40  # reuse distance of bytes that are in no cache
BETWEEN = "between forward and backward"
OPTIMIZER = "the optimizer's step"
COMPILED = "compiled forward and backward"
EVALUATIONS = 32  # forwards without gradients that are recorded; the others count like these


class RecordedStep:
    """The operators of forwards and backwards, until `close`.

    Forwards without gradients, such as an evaluation's or a frozen teacher's, are in a table of
    their own, because not every step has them. The dispatch mode is entered when an outermost
    forward begins and left when it ends or raises, and likewise around `torch.autograd.backward`,
    which is replaced until `close`. A loop that raises therefore leaves no mode on torch's stack.
    What runs elsewhere, a loss that is computed outside of modules and the optimizer's step, is
    only timed.
    """

    def __init__(self) -> None:
        self._modules = Modules()
        self._recorder = _TimedRecorder(self._modules)
        self._without_gradients = _TimedRecorder(self._modules)
        self._running: _TimedRecorder | None = None  # of the outermost forward
        self._evaluations: Counter[nn.Module] = Counter()
        self._later_evaluations = [0]  # of each step after this one, the last one unfinished
        self._compiled_model = ""  # its class
        self._has_forward = False  # with gradients, and recorded
        self._outermost: nn.Module | None = None
        self._in_backward = False
        self._between = 0.0
        self._output_bytes = 0
        self._forward_ended: float | None = None
        self._kept = ExitStack()
        self._kept.enter_context(self._modules)
        self._kept.callback(Forwards(self._forward_begins, self._forward_ends).close)
        original = torch.autograd.backward
        recorded = self._recorded(original)
        torch.autograd.backward = recorded
        self._kept.callback(_put_back, recorded, original)

    @property
    def compiled(self) -> bool:
        """Whether a model that was trained is compiled; nothing of it is recorded."""
        return bool(self._compiled_model)

    @property
    def flops(self) -> dict[str, int]:
        """Dtype -> operations so far."""
        sums: Counter[str] = Counter()
        for key, row in self._recorder.rows.items():
            sums[key.dtype] += row.flops
        return dict(+sums)

    def trained(self, model: nn.Module) -> None:
        """What was trained; no hook sees the forward of a model that is compiled in place."""
        if not self._has_forward and any(map(is_compiled, model.modules())):
            self._compiled_model = class_name(model)

    def close(self) -> None:
        self._kept.close()

    @contextmanager
    def later_evaluations(self) -> Iterator[None]:
        """Counts the forwards without gradients of later steps, of the modules that had some."""
        with ExitStack() as hooks:
            for module in +self._evaluations:
                hooks.callback(around(module, self._evaluation_begins))
            yield

    def later_step_ends(self) -> None:
        """A later step ends."""
        self._later_evaluations.append(0)

    def profiled(
        self, step: float, optimizer: float, state: int, flops: dict[str, int]
    ) -> Profiled:
        """The table, for steps of so many seconds without a wait for data.

        optimizer: seconds of its step. state: bytes that it reads and writes at least. flops: of a
        compiled model, whose forward and backward are one row.
        """
        if self.compiled:
            left = max(0.0, step - optimizer)
            dtype = max(flops, key=lambda dtype: flops[dtype])
            row = Op(COMPILED, "", dtype, self._compiled_model, 1, flops[dtype], (), (left,), 0)
            return Profiled((step,), 0, (row, _timed_row(OPTIMIZER, step - left, state)))
        for recorder in (self._recorder, self._without_gradients):
            recorder.reuse.finish()
        evaluations = median(self._later_evaluations[:-1] or [0])
        evaluated = evaluations / max(1, self._evaluations.total())
        others = (
            _timed_row(BETWEEN, self._between, 2 * self._output_bytes),
            _timed_row(OPTIMIZER, optimizer, state),
        )
        ops = (
            *rows(self._recorder, [0], 1),
            *(_times(op, evaluated) for op in rows(self._without_gradients, [0], 1) if evaluated),
            *(op for op in others if op.seconds[0] > 0),
        )
        return Profiled((max(step, sum(op.seconds[0] for op in ops)),), 0, ops)

    def _forward_begins(self, module: nn.Module) -> None:
        if self._outermost is not None or self._in_backward:
            return
        trains = torch.is_grad_enabled()
        if not trains and self._evaluations.total() >= EVALUATIONS:
            return
        has_compiled = any(map(is_compiled, module.modules()))
        if trains and has_compiled:
            self._compiled_model = class_name(module)
        if self.compiled or has_compiled:
            return  # a compiled teacher's seconds are between forward and backward
        if trains:
            self._forward_ended = None
        elif self._forward_ended is not None:  # a teacher's, before the loss
            self._between += perf_counter() - self._forward_ended
        self._evaluations[module] += not trains
        self._has_forward = self._has_forward or trains
        self._outermost = module
        self._running = self._recorder if trains else self._without_gradients
        self._running.__enter__()

    @observer
    def _evaluation_begins(self, *_: object) -> None:
        self._later_evaluations[-1] += not torch.is_grad_enabled()

    def _forward_ends(self, module: nn.Module, output: object) -> None:
        if module is self._outermost:
            self._outermost = None
            assert self._running is not None
            self._running.__exit__(None, None, None)
            if self._running is self._recorder:
                self._output_bytes += sum(t.nbytes for t in _floats(output))
            if self._running is self._recorder or self._forward_ended is not None:
                self._forward_ended = perf_counter()

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            inside = self._in_backward or self._outermost is not None  # a checkpoint calls it
            if inside or not self._has_forward:  # of compiled code, none is seen
                return original(*args, **kwargs)
            if self._forward_ended is not None:
                self._between += perf_counter() - self._forward_ended
            self._forward_ended = None
            self._in_backward = True
            try:
                with self._recorder:
                    return original(*args, **kwargs)
            finally:
                self._in_backward = False

        return backward


class _TimedRecorder(Recorder):
    """Adds the seconds that each operator takes below the mode."""

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, flops: int) -> None:
        super().saw(func, args, kwargs, out, flops)
        row = self.rows[self.sequence[func._schema.name][-1]]
        row.seconds = [sum(row.seconds) + self.seconds]


def _timed_row(name: str, seconds: float, size: int) -> Op:
    traffic = ((FAR, size),) if size else ()
    return Op(name, "", "", "", 1, 0, traffic, (seconds,), 0)


def _times(op: Op, factor: float) -> Op:
    """The row of an operator that is called so many times as often."""
    return replace(
        op,
        calls=max(1, round(op.calls * factor)),
        flops=round(op.flops * factor),
        traffic=tuple((distance, round(size * factor)) for distance, size in op.traffic),
        seconds=tuple(seconds * factor for seconds in op.seconds),
    )


def _floats(values: object) -> Iterator[Tensor]:
    for t in tree_leaves(values):
        if isinstance(t, Tensor) and t.is_floating_point():
            yield t


def _put_back(recorded: Callable[..., Any], original: Callable[..., Any]) -> None:
    if torch.autograd.backward is recorded:  # else another program has wrapped it since
        torch.autograd.backward = original
