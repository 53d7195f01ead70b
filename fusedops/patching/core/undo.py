"""Restores state after a block, even if KeyboardInterrupt arrives while restoring.

A KeyboardInterrupt may be raised between any two lines. So what puts things back is written such
that it may be repeated, and is repeated until it ends.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import call

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    _pop_mode as _pop_dispatch_mode,
)
from torch.utils._python_dispatch import (
    _push_mode as _push_dispatch_mode,
)

__all__ = ["afterwards", "on_failure", "settings"]


@contextmanager
def afterwards(restore: Callable[[], object]) -> Iterator[None]:
    """Runs `restore`, which may be repeated, to its end after the block.

    An interrupt on the way from the block to here goes past it. Where that would leave a model in
    between, it is entered twice: the outer one does what the inner one has missed.
    """
    to_its_end = _to_its_end  # a local: globals may be None when Python ends
    try:
        yield
    finally:
        to_its_end(restore)


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Runs `undo` as `afterwards` does, where the block was not left by its end or a return."""
    try:
        yield
    except BaseException:
        _to_its_end(undo)
        raise


def _to_its_end(
    restore: Callable[[], object], ending: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Runs `restore`, which may be repeated, until it ends; an interrupt of it is raised then.

    A block that is never left ends with Python: nothing is restored then.
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


def settings() -> Callable[[], None]:
    """The thread's settings of torch and Python's warning filters now: a function that restores
    them, which may be repeated.

    An interrupt between a `with` block and its exit skips the exit. A skipped exit of
    `torch.no_grad()` would leave the caller without gradients.
    """
    gradients = torch.is_grad_enabled()
    devices = ("cpu", "cuda")
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cached, depth = torch.is_autocast_cache_enabled(), _autocast_depth()
    functions, dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    filters, shown = [*warnings.filters], warnings.showwarning

    def restore() -> None:
        torch.set_grad_enabled(gradients)
        while len(_get_current_function_mode_stack()) > len(functions):
            _pop_mode()
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


def _autocast_depth() -> int:
    """How many autocast blocks are open: one call of C, which no interrupt divides."""
    both = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    return [*map(call, both)][1]
