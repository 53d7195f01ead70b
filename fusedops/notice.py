"""Warns once per process if the package runs without its compiled CPU or CUDA kernels."""

import sys
import warnings
from pathlib import Path

import torch

__all__ = ["announce", "give", "warn_once"]

# Frames that are not the caller's own code.
_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_pending = ""
_warned = False


def announce(message: str) -> None:
    """Sets the warning that the first use gives."""
    global _pending
    _pending = message


def give() -> None:
    """Gives the announced warning, if any. Every use calls it."""
    if _pending:
        warn_once(_pending)


# Dynamo then calls it while it traces. torch.compiler's decorator would import Dynamo.
give._dynamo_marked_constant = True  # type: ignore[attr-defined]


def warn_once(message: str) -> None:
    """Gives one UserWarning per process, at the caller's line outside this package and torch."""
    global _warned
    if _warned:
        return
    _warned = True
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
