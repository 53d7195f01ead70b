"""Fixtures of the profiler's tests."""

import pytest

from fusedops.measuring import blocks
from fusedops.profiling.advice import trial


@pytest.fixture
def few_pairs(monkeypatch):
    """An experiment runs four pairs of blocks, however much time its budget has for more."""
    monkeypatch.setattr(trial, "FEWEST", 4)
    monkeypatch.setattr(blocks, "MOST", 4)
