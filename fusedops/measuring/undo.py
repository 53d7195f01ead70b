"""Puts things back: after a `with` block, and the module attributes that patch replaced."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["Replaced", "afterwards", "put_back"]


@contextmanager
def afterwards(restore: Callable[[], object]) -> Iterator[None]:
    """Calls `restore` after the block.

    Not when Python is shutting down, which ends blocks that were never left: globals may then be
    None.
    """
    is_ending = sys.is_finalizing
    try:
        yield
    finally:
        if not is_ending():
            restore()


class Replaced(ABC):
    """A module's attribute that `unpatch` replaces by the earlier one, also in a deep copy."""

    @abstractmethod
    def earlier(self) -> Any:
        """Returns the attribute's value before the patch."""


def put_back(model: nn.Module) -> None:
    """Puts the earlier value of each `Replaced` attribute back, in all modules. Idempotent."""
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, Replaced):
                setattr(module, name, value.earlier())
