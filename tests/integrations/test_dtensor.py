"""Operators on DTensors match plain tensors, and run on local shards where sharding rules allow."""

import pytest
import torch
import torch.distributed.tensor  # registers the rules
from axes import grid
from children import forked
from children.sharding_edges import IN_A_ROW, IN_A_SQUARE
from children.sharding_rules import CASES, COMPILED, SQUARE

from fusedops.patching.core.sharded import all_sharded


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The lines of all ranks: all cases run in one start, as imports take most of the time."""
    script = "-m", "children.sharding_rules"
    done = forked(*script, tmp_path_factory.mktemp("ranks"), large=True).result(timeout=280)
    return (done.stdout + done.stderr).splitlines()


@grid("name", [*(case.name for case in CASES), *(edge.__name__ for edge in IN_A_ROW)])
def test_two_ranks(name, printed):
    for rank in range(2):
        assert f"{name} in_a_row rank {rank}" in printed, "\n".join(printed)[-8000:]


@grid("name", COMPILED)
def test_compiled(name, printed):
    """Not by inductor, whose kernels are the same as for plain tensors."""
    for rank in range(2):
        assert f"compiled {name} in_a_row rank {rank}" in printed, "\n".join(printed)[-8000:]


@grid("name", [*SQUARE, *(edge.__name__ for edge in IN_A_SQUARE)])
def test_a_mesh_of_two_dimensions(name, printed):
    for rank in range(4):
        assert f"{name} in_a_square rank {rank}" in printed, "\n".join(printed)[-8000:]


def test_without_rules_a_patched_model_runs_its_own_code(tmp_path):
    printed = forked("-m", "children.unregistered_rules", tmp_path).printed(timeout=280)
    assert "unfused" in printed


def test_none_is_not_a_sharded_tensor():
    assert not all_sharded() and not all_sharded(None) and not all_sharded(None, torch.ones(1))
