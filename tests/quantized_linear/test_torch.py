"""quantized_linear in PyTorch: autograd, functorch, compile, export, autocast."""

import pytest
import torch
from growth.peaks import peaks

import fusedops
from fusedops.functional import quantized_linear
from fusedops.functional.linear import ACTIVATIONS
from fusedops.testing import check, device_of, errors, gradients, mean, placed
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


def exact(kind, **how):
    """The function and its reference of a weight [30, 40], in float32 products."""
    return functions(quantized(kind, random_weight(30, 40)), compute="exact", **how)


@FORCED
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 40), (40,)], ids=str)
def test_double_backward(kind, backend, activation, shape):
    """In the mean over several inputs: the largest error of a few numbers is luck."""
    x, bias = placed(inputs(shape, 30, torch.float32), device_of(backend))
    run, reference = exact(kind, activation=activation)

    def second(run, x):
        leaves = [x.detach().requires_grad_(), bias.to(x.dtype).requires_grad_()]
        first = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    def draws(run, dtype):
        return [second(run, x.roll(i, -1).to(dtype)) for i in range(8)]

    truth, eager = draws(reference, torch.float64), draws(reference, torch.float32)
    with fusedops.backend(backend):
        found = draws(run, torch.float32)
    of_draws = zip(found, eager, truth, strict=True)
    judged = [[errors(*one, rows=False) for one in zip(*three, strict=True)] for three in of_draws]
    for same in zip(*judged, strict=True):
        assert mean(same).complaint() is None


@KINDS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_in_float64(kind, activation):
    run, _ = functions(quantized(kind, random_weight(3, 5)), activation=activation)
    args = [a.requires_grad_() for a in inputs((2, 5), 3, torch.float64)]
    assert torch.autograd.gradcheck(run, args)
    assert torch.autograd.gradgradcheck(run, args)


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
@pytest.mark.parametrize("wanted", [(1, 0), (0, 1)], ids=str)
def test_only_some_gradients(kind, backend, wanted):
    run, reference = exact(kind, activation="silu")
    args = inputs((9, 40), 30, torch.float32)

    def some(run):
        return lambda *args: run(
            *(a if w else a.detach() for a, w in zip(args, wanted, strict=True))
        )

    check(some(run), some(reference), args, backend)


@FORCED
def test_forward_mode_and_functorch(kind, backend):
    x, bias = placed(inputs((4, 40), 30, torch.float32), device_of(backend))
    t = torch.randn_like(x)
    weight = quantized(kind, random_weight(30, 40)).to(x.device)
    dense = fusedops.functional.dequantize_weight(weight)

    def run(x):
        return quantized_linear(x, weight, bias, activation="gelu", compute="exact")

    def plain(x):
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, dense, bias))

    with fusedops.backend(backend):
        for transform in (
            lambda f: torch.func.jvp(f, (x,), (t,))[1],
            lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x),
            lambda f: torch.func.vmap(f)(torch.stack([x, t])),
            lambda f: torch.func.jacrev(f)(x),
        ):
            torch.testing.assert_close(transform(run), transform(plain), rtol=1e-4, atol=1e-5)


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


@FORCED
def test_inference_mode_and_no_grad(kind, backend):
    args = placed(inputs((20, 40), 30, torch.float32), device_of(backend))
    run, reference = exact(kind)
    with fusedops.backend(backend):
        with torch.inference_mode():
            found = run(*args)
        torch.testing.assert_close(found, reference(*args))
        assert not run(*args).requires_grad
        with torch.no_grad():
            assert not run(*(a.requires_grad_() for a in args)).requires_grad


@FORCED
def test_gradients_are_never_written_to(kind, backend):
    args = placed(inputs((6, 40), 30, torch.float32), device_of(backend))
    run, _ = exact(kind, activation="gelu")
    leaves = [a.requires_grad_() for a in args]
    with fusedops.backend(backend):
        y = run(*leaves)
        dy = torch.randn_like(y)
        kept = dy.clone()
        y.backward(dy)
    assert torch.equal(dy, kept)


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


@FORCED
@pytest.mark.parametrize("rows", [3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(kind, backend, dtype, rows):
    q = quantized(kind, random_weight(30, 40)).to(device_of(backend))
    x, bias = placed(inputs((rows, 40), 30, dtype), device_of(backend))
    parts = q.qweight, q.scales, q.zeros
    sizes = q.format, q.out_features, q.in_features, q.group_size
    ops = torch.ops.fusedops
    utils = list(torch.library._OPCHECK_DEFAULT_UTILS)
    if kind == "fp8":  # torch's test of the schema multiplies its arguments
        utils.remove("test_schema")

    def opcheck(op, *args):
        torch.library.opcheck(op.default, args, test_utils=utils)

    with fusedops.backend(backend):
        for leaf in (x, x.clone().requires_grad_()):
            opcheck(ops.quantized_linear, leaf, *parts, bias, *sizes, "gelu", None, "exact")
        how = "gelu", "none", "any"
        opcheck(ops.quantized_linear_forward, x, *parts, bias, *sizes, *how, True)
        opcheck(ops.quantized_linear_tiles, x, *parts, bias, *sizes, *how, True)
        z, mask = torch.randn(rows, 30).to(x), [True, True]
        opcheck(ops.quantized_linear_backward, z, *parts, z, *sizes, "gelu", "any", mask)
        opcheck(ops.dequantize_weight, *parts, *sizes, dtype)


@FORCED
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(kind, backend, dynamic):
    torch.compiler.reset()  # what was compiled keeps its backend
    weight = quantized(kind, random_weight(30, 40)).to(device_of(backend))

    def layer(x, bias):
        return quantized_linear(x, weight, bias, activation="gelu", compute="exact")

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with fusedops.backend(backend):
        for rows in (3, 6, 9):
            args = placed(inputs((rows, 40), 30, torch.float32), device_of(backend))
            expected = gradients(layer, args)
            for key, value in gradients(compiled, args).items():
                torch.testing.assert_close(value, expected[key])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_x_and_bias_alone(backend):
    x, bias = placed(inputs((6, 40), 30, torch.float32), device_of(backend))
    weight = quantized("int8", random_weight(30, 40)).to(x.device)
    with fusedops.backend(backend):
        with torch.autocast(x.device.type, torch.bfloat16):
            found = quantized_linear(x.requires_grad_(), weight, bias, activation="gelu")
        by_hand = quantized_linear(x.bfloat16(), weight, bias.bfloat16(), activation="gelu")
        assert torch.equal(found, by_hand) and found.dtype == torch.bfloat16
        found.sum().backward()
    assert x.grad.dtype == torch.float32
