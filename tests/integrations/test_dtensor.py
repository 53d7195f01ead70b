"""Operators on DTensors match plain tensors, and run on local shards where sharding rules allow.

The ranks are threads: collectives over gloo time out now and then on a busy machine, also without
fusedops. A few cases run in processes over gloo.
"""

import math
import subprocess
import sys

import pytest
import torch
import torch.distributed.tensor  # registers the rules
from axes import grid
from children import TESTS, assert_ranks_pass, forked
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


def test_a_rank_that_raises_ends_the_others():
    def work(rank):
        if rank == 0:
            raise ValueError("rank 0 fails")
        torch.distributed.barrier()

    with pytest.raises(ValueError, match="rank 0 fails"):
        in_threads(2, work)


def test_ranks_that_wait_for_ever_are_ended(capfd):
    def work(rank):
        if rank == 1:
            torch.distributed.barrier()

    in_threads(2, lambda rank: None)  # creates the groups, which takes long on a busy machine
    with pytest.raises(TimeoutError, match=r"ranks still wait after 3 s"):
        in_threads(2, work, limit=3)
    assert "in work\n" in capfd.readouterr().err


HANGS = """
import time
from children.ranks import in_threads

in_threads(2, lambda rank: None)
in_threads(2, lambda rank: time.sleep(1000 * rank), limit=1)
"""


def test_python_ends_without_a_rank_that_hangs_elsewhere():
    """Without the fork server, whose processes end at once."""
    words = [sys.executable, "-c", HANGS]
    done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "ranks still wait after 1 s" in done.stderr, done.stderr


def test_without_rules_a_patched_model_runs_its_own_code(tmp_path):
    printed = forked("-m", "children.unregistered_rules", tmp_path, large=True).printed()
    assert "unfused" in printed


def test_none_is_not_a_sharded_tensor():
    assert not all_sharded() and not all_sharded(None) and not all_sharded(None, torch.ones(1))
