"""Operators on DTensors match plain tensors, and run on local shards where sharding rules allow.

The ranks are threads: collectives over gloo time out now and then on a busy machine, also without
fusedops. A few cases run in processes over gloo.
"""

import math

import pytest
import torch
import torch.distributed.tensor  # registers the rules
from axes import grid
from children import assert_ranks_pass, forked
from children.ranks import in_threads
from children.sharding_edges import IN_A_ROW, IN_A_SQUARE, IN_PROCESSES
from children.sharding_rules import CASES, COMPILED, SQUARE, compiled, in_a_row, in_a_square
from torch.distributed.device_mesh import init_device_mesh

from fusedops.patching.core.sharded import all_sharded

NAMED = {case.name: case for case in CASES}
# Their collectives: all-reduce, all-gather and reduce-scatter; IN_PROCESSES have broadcasts.
OVER_GLOO = "linear by depth", "rotary_embedding", "experts", "cross_entropy mean"

pytestmark = pytest.mark.usefixtures("any_size")


def on_mesh(shape, check):
    in_threads(math.prod(shape), lambda rank: check(init_device_mesh("cpu", shape), rank=rank))


@grid("name", NAMED)
def test_two_ranks(name):
    on_mesh((2,), lambda mesh, rank: in_a_row(NAMED[name], mesh))


@grid("name", COMPILED)
def test_compiled(name):
    """Not by inductor, whose kernels are the same as for plain tensors."""
    on_mesh((2,), lambda mesh, rank: compiled(NAMED[name], mesh))


@grid("name", SQUARE)
def test_a_mesh_of_two_dimensions(name):
    on_mesh((2, 2), lambda mesh, rank: in_a_square(NAMED[name], mesh))


@pytest.mark.parametrize("edge", IN_A_ROW)
def test_edges_on_two_ranks(edge):
    on_mesh((2,), edge)


@pytest.mark.parametrize("edge", IN_A_SQUARE)
def test_edges_on_a_mesh_of_two_dimensions(edge):
    on_mesh((2, 2), edge)


def test_two_processes(tmp_path):
    """Over gloo: each kind of collective, and edges that need a generator for each rank."""
    cases = [*OVER_GLOO, *(edge.__name__ for edge in IN_PROCESSES)]
    assert_ranks_pass("sharding_rules", 2, cases, tmp_path, limit=120)


def test_without_rules_a_patched_model_runs_its_own_code(tmp_path):
    printed = forked("-m", "children.unregistered_rules", tmp_path, large=True).printed()
    assert "unfused" in printed


def test_none_is_not_a_sharded_tensor():
    assert not all_sharded() and not all_sharded(None) and not all_sharded(None, torch.ones(1))
