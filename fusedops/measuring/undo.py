"""Restores state after a `with` block, even if KeyboardInterrupt arrives meanwhile.

A KeyboardInterrupt may arrive between any two lines. So every restore function is idempotent and is
repeated until it completes.
"""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import call
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    _pop_mode as _pop_dispatch_mode,
)
from torch.utils._python_dispatch import (
    _push_mode as _push_dispatch_mode,
)

__all__ = ["Replaced", "afterwards", "on_failure", "put_back", "settings"]


class Replaced(ABC):
    """A module's attribute that `unpatch` replaces by the earlier one, also in a deep copy."""

    @abstractmethod
    def earlier(self) -> Any:
        """Returns the attribute's value before the patch."""


@contextmanager
def afterwards(restore: Callable[[], object]) -> Iterator[None]:
    """Runs the idempotent `restore` to completion after the block.

    An interrupt between the block's end and this code skips it. Where that would leave a model half
    restored, callers nest this twice: the outer one then does what the inner one missed.
    """
    to_its_end = _to_its_end  # a local, as globals may be None at shutdown
    try:
        yield
    finally:
        to_its_end(restore)


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Runs `undo` as `afterwards` does, but only if the block raised."""
    try:
        yield
    except BaseException:
        _to_its_end(undo)
        raise


def _to_its_end(
    restore: Callable[[], object], ending: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Repeats the idempotent `restore` until it completes; then raises a pending interrupt.

    Nothing is restored when Python is shutting down, which ends blocks that were never left.
    """
    if ending():
        return
    interrupt = None
    while True:
        try:
            restore()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def put_back(model: nn.Module) -> None:
    """Puts the earlier value of each `Replaced` attribute back, in all modules. Idempotent."""
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, Replaced):
                setattr(module, name, value.earlier())


def settings() -> Callable[[], None]:
    """Returns an idempotent function that restores torch's thread settings and warning filters.

    An interrupt between a `with` block and its exit skips the exit. For `torch.no_grad()`, that
    would leave the caller without gradients.
    """
    gradients = torch.is_grad_enabled()
    devices = ("cpu", "cuda")
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cached, depth = torch.is_autocast_cache_enabled(), _autocast_depth()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    hooks = _saved_tensors_hooks()
    functions, dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    filters, shown = [*warnings.filters], warnings.showwarning

    def restore() -> None:
        torch.set_grad_enabled(gradients)
        torch.autograd.set_detect_anomaly(*anomaly)
        while _saved_tensors_hooks() not in (None, hooks):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        while _get_current_function_mode_stack():
            _pop_mode()
        for mode in functions:
            _push_mode(mode)
        for missing in range(len(_get_current_dispatch_mode_stack()), len(dispatches)):
            _push_dispatch_mode(dispatches[missing])
        while len(_get_current_dispatch_mode_stack()) > len(dispatches):
            _pop_dispatch_mode()
        for device, enabled, dtype in casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        while _autocast_depth() > depth:
            torch.autocast_decrement_nesting()
        if [*warnings.filters] != filters:
            warnings.resetwarnings()
            warnings.filters[:] = filters  # type: ignore[index]
        warnings.showwarning = shown

    return restore


def _saved_tensors_hooks() -> object:
    """The pair of hooks that run when autograd saves a tensor, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def _autocast_depth() -> int:
    """The number of open autocast blocks; one C call, which no interrupt can split."""
    both = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    return [*map(call, both)][1]
