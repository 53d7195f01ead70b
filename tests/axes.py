"""Parametrizes a test over the product of several axes in one line."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def grid(*first: Any, **axes: Iterable[Any]) -> Callable[[Callable], Callable]:
    """`grid("op,backend", CASES, dtype=FLOATS)` runs a test for each case in each dtype.

    first: a parametrize mark's names and values, for an axis that has several names. A value's id
    is its name, if it has one, or its text.
    """
    marks = [first] if first else []
    marks += list(axes.items())

    def decorated(test: Callable) -> Callable:
        for names, values in reversed(marks):
            test = pytest.mark.parametrize(names, values, ids=_named)(test)
        return test

    return decorated


def _named(value: Any) -> str | None:
    return None if isinstance(value, str) or hasattr(value, "__name__") else str(value)
