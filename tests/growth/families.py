"""Collects the calls for memory-growth tests from each operator family's `growth.py`."""

import importlib
from collections.abc import Iterator
from typing import Any

from fusedops.backends import FAMILIES
from growth.subject import Subject


def _of(family: str) -> Any:
    return importlib.import_module(f"{family}.growth")


def subjects(family: str) -> Iterator[Subject]:
    """Returns a family's functions as subjects."""
    return (make() for make in _of(family).OPERATORS.values())


OPERATORS, MODULES = {}, {}
for _family in FAMILIES:
    OPERATORS |= _of(_family).OPERATORS
    MODULES |= getattr(_of(_family), "MODULES", {})
