"""Every operator on a GPU: graphs, launches, waiting. More is in the families' own test_cuda.py."""

import pytest
import torch

from benchmarks.harness import cuda
from contract.cuda_graphs import capture, no_synchronisation
from contract.family import BF16, as_tuple, each, on
from fusedops.testing import backends

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _on_gpus(family):
    for name, call in family.on_gpus.items():
        for backend in backends(call.operator):
            if backend in ("cuda", "triton"):
                yield f"{name}-{backend}", (call, backend, family.launches)


ON_GPUS = each("call,backend,launches", _on_gpus)


def step_of(call, backend):
    """A forward, a forward and backward, and the tensors of both."""
    run, leaves = call.of_leaves(call.function, call.args(dtype=BF16, backend=backend))
    leaves = [x.requires_grad_() for x in leaves]
    with torch.no_grad():
        cotangents = [torch.randn_like(o) for o in as_tuple(run(*leaves))]

    def step():
        outputs = as_tuple(run(*leaves))
        return *(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, cotangents)

    return lambda: run(*leaves), step, [*leaves, *cotangents]


@ON_GPUS
def test_graph_replays_what_eager_gives(call, backend, launches):
    with on(backend):
        _, step, tensors = step_of(call, backend)
        graph, captured = capture(step)
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_()
        graph.replay()
        expected = step()
    assert all(map(torch.equal, captured, expected))


@ON_GPUS
def test_a_direction_is_one_launch(call, backend, launches):
    with on(backend):
        forward, step, _ = step_of(call, backend)
        step()
        with torch.no_grad():
            assert cuda.launches(forward) == 1
        assert launches is None or cuda.launches(step) == launches


@ON_GPUS
def test_nothing_synchronises(call, backend, launches):
    """As far as torch sees it. What it does not see fails the capture in the tests of graphs."""
    with on(backend):
        _, step, _ = step_of(call, backend)
        step()
        with no_synchronisation():
            step()
