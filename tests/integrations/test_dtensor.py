"""Operators on DTensors: whole tensors' results, and local kernels where the rules say so."""

import pytest
from axes import grid
from children import forked
from children.sharding_rules import CASES, SQUARE


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The lines of all ranks: all cases run in one start, as imports take most of the time."""
    script = "-m", "children.sharding_rules"
    done = forked(*script, tmp_path_factory.mktemp("ranks"), large=True).result(timeout=280)
    return (done.stdout + done.stderr).splitlines()


@grid("name", [case.name for case in CASES])
def test_two_ranks(name, printed):
    for rank in range(2):
        assert f"{name} in_a_row rank {rank}" in printed, "\n".join(printed)[-8000:]


@grid("name", SQUARE)
def test_a_mesh_of_two_dimensions(name, printed):
    for rank in range(4):
        assert f"{name} in_a_square rank {rank}" in printed, "\n".join(printed)[-8000:]
