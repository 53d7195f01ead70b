"""Norm tests that need a GPU: dropout in graphs, and several devices."""

import pytest
import torch
from axes import grid
from contract.cuda_graphs import capture

import fusedops
from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedops.testing import backends, gradients

FUNCTIONS = {f.__name__: f for f in (layer_norm, rms_norm, add_layer_norm, add_rms_norm)}
CASES = [(op, name) for op in FUNCTIONS for name in backends(op) if name in ("cuda", "triton")]
# cuda's forward: an unaligned row in shared memory and one in global memory, and an aligned row in
# parts.
LONG = [(3, 70001), (2, 150001), (2, 262144)]


def inputs(op, shape, dtype=torch.bfloat16, device="cuda"):
    x, residual = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (torch.randn(shape[-1:], dtype=dtype, device=device) for _ in range(2))
    parameters = (weight, bias, 1e-6) if "layer" in op else (weight, 1e-6)
    return (x, residual if "add" in op else shape[-1:], *parameters)


def tensors(args):
    return [a for a in args if isinstance(a, torch.Tensor)]


def step(op, args, cotangent, **kwargs):
    """Runs forward and backward; returns the outputs and the leaves' gradients."""
    outputs = FUNCTIONS[op](*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = torch.autograd.grad(outputs, tensors(args), [cotangent] * len(outputs))
    return (*(o.detach() for o in outputs), *grads)


@grid("op,backend", [c for c in CASES if "add" in c[0]], shape=[(64, 512), *LONG])
def test_graph_draws_a_new_mask_at_each_replay(op, backend, shape):
    """Forward and backward use the same mask: dx is twice dresidual where x is kept."""
    args = inputs(op, shape)
    leaves = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    cotangent, masks = torch.randn_like(args[0]), []
    with fusedops.backend(backend):
        graph, results = capture(lambda: step(op, leaves, cotangent, dropout_p=0.5))
        for _ in range(2):
            graph.replay()
            _, h, dx, dresidual, *_ = results
            stays = h != args[1]
            assert torch.equal(dx[stays], 2 * dresidual[stays])
            assert 0.45 < (dx == 0).double().mean().item() < 0.55
            masks.append(dx == 0)
    assert not torch.equal(*masks)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op,backend", CASES)
def test_runs_where_its_tensors_are(op, backend):
    here = inputs(op, (64, 1024), device="cuda:0")
    there = tuple(a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in here)
    with fusedops.backend(backend):
        expected, actual = gradients(FUNCTIONS[op], here), gradients(FUNCTIONS[op], there)
    assert {value.device.index for value in actual.values()} == {1}
    assert all(torch.equal(actual[key].cpu(), expected[key].cpu()) for key in expected)
