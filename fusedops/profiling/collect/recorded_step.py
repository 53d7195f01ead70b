"""Records the operators of one step of a loop that nobody can run again."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from fusedops.patching.core.swap import observer
from fusedops.profiling.collect.modules import Modules
from fusedops.profiling.collect.operators import Recorder, rows
from fusedops.profiling.evidence import Op, Profiled

__all__ = ["RecordedStep"]

FAR = 2**40  # reuse distance of bytes that are in no cache
BETWEEN = "between forward and backward"
OPTIMIZER = "the optimizer's step"


class RecordedStep:
    """The operators of the forwards that need gradients and of the backwards, until `close`.

    The dispatch mode is entered when an outermost forward begins and left when it ends or raises,
    and likewise around `torch.autograd.backward`, which is replaced until `close`. A loop that
    raises therefore leaves no mode on torch's stack. What runs elsewhere, a loss that is computed
    outside of modules and the optimizer's step, is only timed. compiled: whether a model that ran
    is compiled; nothing of it is recorded.
    """

    def __init__(self) -> None:
        self._modules = Modules()
        self._recorder = _TimedRecorder(self._modules)
        self.compiled = False
        self._outermost: nn.Module | None = None
        self._in_backward = False
        self._between = 0.0
        self._output_bytes = 0
        self._forward_ended: float | None = None
        self._kept = ExitStack()
        self._kept.enter_context(self._modules)
        for handle in (
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ends, always_call=True),
        ):
            self._kept.callback(handle.remove)
        original = torch.autograd.backward
        recorded = self._recorded(original)
        torch.autograd.backward = recorded
        self._kept.callback(_put_back, recorded, original)

    @property
    def flops(self) -> dict[str, int]:
        """Dtype -> operations so far."""
        sums: Counter[str] = Counter()
        for key, row in self._recorder.rows.items():
            sums[key.dtype] += row.flops
        return dict(+sums)

    def close(self) -> None:
        self._kept.close()

    def profiled(self, step: float, optimizer: float, state: int) -> Profiled:
        """The table, for steps of so many seconds without a wait for data.

        optimizer: seconds of its step. state: bytes that it reads and writes at least.
        """
        self._recorder.reuse.finish()
        others = (
            _timed_row(BETWEEN, self._between, 2 * self._output_bytes),
            _timed_row(OPTIMIZER, optimizer, state),
        )
        ops = (*rows(self._recorder, [0], 1), *(op for op in others if op.seconds[0] > 0))
        return Profiled((max(step, sum(op.seconds[0] for op in ops)),), 0, ops)

    @observer
    def _forward_begins(self, module: nn.Module, *_: object) -> None:
        if self._outermost is None and not self._in_backward and torch.is_grad_enabled():
            self._forward_ended = None
            self.compiled = self.compiled or _is_compiled(module)
            if not self.compiled:
                self._outermost = module
                self._recorder.__enter__()

    @observer
    def _forward_ends(self, module: nn.Module, args: object, output: object) -> None:
        if module is self._outermost:
            self._outermost = None
            self._recorder.__exit__(None, None, None)
            self._output_bytes += sum(t.nbytes for t in _floats(output))
            self._forward_ended = perf_counter()

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            inside = self._in_backward or self._outermost is not None  # a checkpoint calls it
            if inside or self.compiled:
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


def _floats(values: object) -> Iterator[Tensor]:
    for t in tree_leaves(values):
        if isinstance(t, Tensor) and t.is_floating_point():
            yield t


def _is_compiled(model: nn.Module) -> bool:
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None)
        for m in model.modules()
    )


def _put_back(recorded: Callable[..., Any], original: Callable[..., Any]) -> None:
    if torch.autograd.backward is recorded:  # else another program has wrapped it since
        torch.autograd.backward = original
