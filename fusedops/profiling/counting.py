"""Counts a step's forward and backward FLOPs, in a dispatch mode entered around each of them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn

from fusedops.profiling.collect.arithmetic import Arithmetic

__all__ = ["StepArithmetic"]


class StepArithmetic:
    """FLOPs of a model's forwards and of the backwards until `close`.

    The dispatch mode is entered when a forward begins and left when it ends or raises, and likewise
    around `torch.autograd.backward`, which is replaced until `close`. A loop that raises therefore
    leaves no mode on torch's stack. Arithmetic outside of both, such as that of the optimizer or of
    a loss that is computed outside of the model, is not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counter = Arithmetic()
        self._inside = False
        self._kept = ExitStack()
        for handle in (
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends, always_call=True),
        ):
            self._kept.callback(handle.remove)
        original = torch.autograd.backward
        counted = self._counted(original)
        torch.autograd.backward = counted
        self._kept.callback(_put_back, counted, original)

    @property
    def flops(self) -> dict[str, int]:
        """Dtype -> operations so far."""
        return dict(self._counter.flops)

    def close(self) -> None:
        self._kept.close()

    def _forward_begins(self, *_: object) -> None:
        if not self._inside and torch.is_grad_enabled():
            self._inside = True
            self._counter.__enter__()

    def _forward_ends(self, *_: object) -> None:
        if self._inside:
            self._inside = False
            self._counter.__exit__(None, None, None)

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # checkpointing calls it within a backward
                return original(*args, **kwargs)
            self._inside = True
            try:
                with self._counter:
                    return original(*args, **kwargs)
            finally:
                self._inside = False

        return backward


def _put_back(counted: Callable[..., Any], original: Callable[..., Any]) -> None:
    if torch.autograd.backward is counted:  # else another program has wrapped it since
        torch.autograd.backward = original
