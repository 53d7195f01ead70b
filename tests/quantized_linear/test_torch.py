"""quantized_linear's gradients, saved tensors, peak memory and autocast in PyTorch."""

import pytest
import torch
from contract.wrapped import with_gradients_of
from growth.peaks import peaks

import fusedops
from fusedops.functional import quantized_linear
from fusedops.testing import check, device_of, gradients, placed
from quantized_linear.cases import (
    BACKENDS,
    CASES,
    FORMATS,
    functions,
    inputs,
    quantized,
    random_weight,
)

KINDS = pytest.mark.parametrize("kind", FORMATS)
FORCED = pytest.mark.parametrize("kind,backend", CASES)


def exact(kind, **options):
    """The function and its reference of a weight [30, 40], in float32 products."""
    return functions(quantized(kind, random_weight(30, 40)), compute="exact", **options)


@FORCED
def test_a_gradient_of_a_gradient_of_one_leaf(kind, backend):
    """z's own gradient comes back to the node, which has none of y then."""
    x, bias = placed(inputs((4, 40), 30, torch.float32), device_of(backend))
    x.requires_grad_()

    def second(run):
        (dx,) = torch.autograd.grad(run(x, bias).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x)[0]

    run, reference = exact(kind, activation="gelu")
    with fusedops.backend(backend):
        torch.testing.assert_close(second(run), second(reference))


@FORCED
@pytest.mark.parametrize("which", [0, 1])
def test_only_one_gradient(kind, backend, which):
    runs = (with_gradients_of(run, which) for run in exact(kind, activation="silu"))
    check(*runs, inputs((9, 40), 30, torch.float32), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_passes_through_rounded_inputs(backend):
    x, bias = placed(inputs((6, 40), 30, torch.float32), device_of(backend))
    weight = quantized("int8", random_weight(30, 40))
    with fusedops.backend(backend):
        grads = [
            gradients(functions(weight, input_format=rounds, compute="exact")[0], (x, bias))
            for rounds in (None, "int8")
        ]
    torch.testing.assert_close(grads[0]["gradient 0"], grads[1]["gradient 0"])


def test_nothing_of_x_is_kept():
    """Codes have no gradient, so x is not saved: its memory is free once it is used."""
    x, bias = inputs((6, 40), 30, torch.float32)
    saved = []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with pack:
        exact("nf4")[0](x.requires_grad_(), bias)
    assert not any(t.data_ptr() == x.data_ptr() for t in saved)


GROWTH = """
from fusedops.nn import QuantizedLinear

for format in sys.argv[1:]:
    layer = QuantizedLinear(4096, 4096, format=format)
    x = torch.randn(64, 4096).requires_grad_()
    grow(lambda: layer(x).sum().backward())
"""


def test_no_copy_of_the_weight_is_made():
    """In float32 it is 64 MiB, in bfloat16 32. x, y and their gradients are 1 MiB each."""
    grown = peaks(GROWTH, "int8", "int8", "int4", "nf4", "fp8")
    assert len(grown) == 4 and max(grown) < 12 * 2**20, grown


def test_scales_take_no_gradient():
    weight = quantized("int8", random_weight(4, 8))
    weight.scales.requires_grad_()
    with pytest.raises(RuntimeError, match="scales must not require a gradient"):
        quantized_linear(torch.zeros(3, 8), weight)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_x_and_bias_alone(backend):
    x, bias = placed(inputs((6, 40), 30, torch.float32), device_of(backend))
    weight = quantized("int8", random_weight(30, 40)).to(x.device)
    with fusedops.backend(backend):
        with torch.autocast(x.device.type, torch.bfloat16):
            y = quantized_linear(x.requires_grad_(), weight, bias, activation="gelu")
        by_hand = quantized_linear(x.bfloat16(), weight, bias.bfloat16(), activation="gelu")
        assert torch.equal(y, by_hand) and y.dtype == torch.bfloat16
        y.sum().backward()
    assert x.grad.dtype == torch.float32
