"""Parametrizes a test over the product of several axes in one line."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def grid(*first: Any, **axes: Iterable[Any]) -> Callable[[Callable], Callable]:
    """`grid("op,backend", CASES, dtype=FLOATS)` runs a test for each case in each dtype.

    first: a parametrize mark's names and values, for an axis that has several names. The id of a
    number, a dtype or a sequence of them is its text; pytest names the other values.
    """
    marks = [first] if first else []
    marks += list(axes.items())

    def decorated(test: Callable) -> Callable:
        for names, values in reversed(marks):
            test = pytest.mark.parametrize(names, values, ids=_named)(test)
        return test

    return decorated


def _named(value: Any) -> str | None:
    """A text that is the same in every process; None where pytest must number the value."""
    return str(value) if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(isinstance(one, str) or _is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | torch.dtype | torch.device)
