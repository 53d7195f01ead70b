"""Finds the lines of code that make the host wait for the GPU."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fusedops.profiling.collect.trace import Wait

__all__ = ["lines_of", "named", "synchronizing_lines"]

WARNING = "called a synchronizing CUDA operation"  # begins what torch says in this mode


def synchronizing_lines(call: Callable[[], Any], cuda: Any) -> list[str]:
    """Runs a step in torch's mode that warns of each wait; the mode is put back.

    torch sees neither collectives nor `torch.cuda.synchronize`.
    """
    before = cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            cuda.set_sync_debug_mode(before)
    return lines_of(caught)


def lines_of(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """`train.py:12` of each warning that is about a wait, in order."""
    return [
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if str(warning.message).startswith(WARNING)
    ]


def named(waits: Sequence[Sequence[Wait]], lines: Sequence[str]) -> list[list[Wait]]:
    """The waits of each step with their lines of code, where a step has as many as there are lines.

    In others, such as steps that call `torch.cuda.synchronize`, the waits keep their operators.
    """
    return [
        [Wait(line, w.seconds, w.gap) for w, line in zip(in_step, lines, strict=True)]
        if len(in_step) == len(lines)
        else list(in_step)
        for in_step in waits
    ]
