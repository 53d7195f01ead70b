"""Rotary tests that need a GPU: graphs, streams, launches, large tensors."""

import pytest
import torch

import fusedops
from benchmarks.harness import cuda
from fusedops.functional import rotary_embedding
from fusedops.testing import backends
from rotary.cases import LAYOUTS, inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BACKENDS = [name for name in backends("rotary_embedding") if name == "cuda"]
PAIRS = pytest.mark.parametrize("interleaved", LAYOUTS, ids=["halves", "interleaved"])


def arguments():
    """q and k as leaves, cos and sin, and what comes back."""
    made = [x.cuda() for x in inputs((32, 8), 64, 128, dtype=torch.bfloat16)]
    args = [x.requires_grad_() for x in made[:2]]
    return args, made[2:], [torch.randn_like(x) for x in args]


def step(args, table, cotangents, interleaved):
    """Forward and backward: the outputs and the gradients."""
    found = rotary_embedding(*args, *table, interleaved=interleaved)
    return *(y.detach() for y in found), *torch.autograd.grad(found, args, cotangents)


@pytest.mark.parametrize("backend", BACKENDS)
@PAIRS
def test_graph_replays_what_eager_gives(backend, interleaved):
    args, table, cotangents = arguments()
    with fusedops.backend(backend):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(args, table, cotangents, interleaved)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(args, table, cotangents, interleaved)
        with torch.no_grad():
            for tensor in (*args, *cotangents):
                tensor.normal_()
        graph.replay()
        expected = step(args, table, cotangents, interleaved)
    assert all(map(torch.equal, captured, expected))


@pytest.mark.parametrize("backend", BACKENDS)
@PAIRS
def test_a_direction_is_one_launch_and_nothing_synchronises(backend, interleaved):
    args, table, cotangents = arguments()
    with fusedops.backend(backend):
        step(args, table, cotangents, interleaved)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(args, table, cotangents, interleaved)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert cuda.launches(lambda: step(args, table, cotangents, interleaved)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
@PAIRS
def test_more_elements_than_int32_counts(backend, interleaved):
    """Positions are independent: the last ones alone give the same bits."""
    batch, heads, seq, width = 2, 8, 2**20 + 3, 128 + 8
    if torch.cuda.mem_get_info()[0] < 5 * 2 * batch * heads * seq * width:
        pytest.skip("needs 24 GiB of free GPU memory")
    q = torch.randn(batch, heads, seq, width, dtype=torch.bfloat16, device="cuda")
    k = q[:, :1]
    angle = torch.randn(1, seq, 128, device="cuda")
    table = angle.cos().bfloat16(), angle.sin().bfloat16()
    with fusedops.backend(backend):
        found = rotary_embedding(q, k, *table, interleaved=interleaved)
        few = (t[..., -7:, :] for t in (q, k, *table))
        expected = rotary_embedding(*few, interleaved=interleaved)
    assert all(torch.equal(y[..., -7:, :], e) for y, e in zip(found, expected, strict=True))
