"""Restores state after a block, even if KeyboardInterrupt arrives while restoring.

A KeyboardInterrupt may be raised between any two lines. So what puts things back is written such
that it may be repeated, and is repeated until it ends.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["afterwards", "on_failure"]


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
