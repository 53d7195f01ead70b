"""Gated-activation tests that need a GPU: graphs, streams, launches, large tensors."""

import pytest
import torch

import fusedops
from benchmarks.harness import cuda
from fusedops.functional import swiglu
from fusedops.testing import backends
from gated_activation.cases import KINDS, inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BACKENDS = [name for name in backends("swiglu") if name == "cuda"]
CASES = [(kind, name) for kind in KINDS for name in BACKENDS]
FORMS = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])


def leaves(shape, packed):
    return [t.cuda().requires_grad_() for t in inputs(shape, torch.bfloat16, packed)]


def step(kind, args, cotangent):
    """Forward and backward of leaves: y and the gradients."""
    function, _, how = KINDS[kind]
    y = function(*args, **how)
    return y.detach(), *torch.autograd.grad(y, args, cotangent)


@pytest.mark.parametrize("kind,backend", CASES)
@FORMS
def test_graph_replays_what_eager_gives(kind, backend, packed):
    args, cotangent = leaves((64, 4096), packed), torch.randn(64, 4096).cuda().bfloat16()
    with fusedops.backend(backend):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(kind, args, cotangent)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(kind, args, cotangent)
        with torch.no_grad():
            for tensor in (*args, cotangent):
                tensor.normal_()
        graph.replay()
        expected = step(kind, args, cotangent)
    assert all(map(torch.equal, captured, expected))


@pytest.mark.parametrize("kind,backend", CASES)
@FORMS
def test_a_direction_is_one_launch_and_nothing_synchronises(kind, backend, packed):
    args, cotangent = leaves((64, 4096), packed), torch.randn(64, 4096).cuda().bfloat16()
    with fusedops.backend(backend):
        step(kind, args, cotangent)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(kind, args, cotangent)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert cuda.launches(lambda: step(kind, args, cotangent)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
@FORMS
def test_more_elements_than_int32_counts(backend, packed):
    """Rows are independent: the last ones alone give the same bits."""
    shape = (2**31 // 8192 + 3, 8192)
    if torch.cuda.mem_get_info()[0] < 2 * 8 * shape[0] * shape[1]:
        pytest.skip("needs 32 GiB of free GPU memory")
    wide = (shape[0], 2 * shape[1]) if packed else shape
    whole = [torch.randn(wide, dtype=torch.bfloat16, device="cuda") for _ in range(2 - packed)]
    with fusedops.backend(backend):
        args = [t.requires_grad_() for t in whole]
        y = swiglu(*args)
        grads = torch.autograd.grad(y, args, y.detach())
        few = [t[-7:].detach().requires_grad_() for t in whole]
        last = swiglu(*few)
        expected = torch.autograd.grad(last, few, last.detach())
    assert torch.equal(y[-7:], last)
    assert all(torch.equal(g[-7:], e) for g, e in zip(grads, expected, strict=True))
