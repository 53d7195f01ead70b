"""The one warning about what this package runs on: at the first use, at most once a process."""

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
    """Sets what the first use warns of."""
    global _pending
    _pending = message


def give() -> None:
    """Warns of what has been announced. Every use calls it."""
    if _pending and not _warned:
        warn_once(_pending)


def warn_once(message: str) -> None:
    """The first time, a UserWarning at the line outside of this package and torch that led here."""
    global _warned
    if _warned:
        return
    _warned = True
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
