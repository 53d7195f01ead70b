"""fusedops.nn's norm modules match torch's in results, parameters and state dicts."""

import math
from functools import partial

import pytest
import torch
from axes import grid
from contract.fuzzing import drawn, shapes
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fusedops
from fusedops.functional import layer_norm, rms_norm
from fusedops.testing import yardstick

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
MODULES = [
    (fusedops.nn.LayerNorm, nn.LayerNorm, {}),
    (fusedops.nn.LayerNorm, nn.LayerNorm, {"bias": False}),
    (fusedops.nn.LayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
    (fusedops.nn.RMSNorm, nn.RMSNorm, {}),
    (fusedops.nn.RMSNorm, nn.RMSNorm, {"eps": 1e-3}),
    (fusedops.nn.RMSNorm, nn.RMSNorm, {"elementwise_affine": False}),
]


@grid("ours,theirs,kwargs", MODULES, shape=[12, (12,), (3, 4)], dtype=FLOATS)
def test_module_twins(ours, theirs, kwargs, shape, dtype):
    a, b = ours(shape, **kwargs, dtype=dtype), theirs(shape, **kwargs, dtype=dtype)
    for parameter in b.parameters():
        nn.init.normal_(parameter)
    a.load_state_dict(b.state_dict(), strict=True)
    b.load_state_dict(a.state_dict(), strict=True)
    x = torch.randn(2, 3, *([shape] if isinstance(shape, int) else shape), dtype=dtype)
    exact = b.double()(x.double())
    b.to(dtype)
    assert yardstick(a(x).detach(), b(x).detach(), exact.detach()) is None
    assert list(a.state_dict()) == list(b.state_dict()) and repr(a) == repr(b)


@grid("ours,theirs,kwargs", MODULES, shape=[12, (3, 4)])
def test_module_twins_have_the_same_gradients(ours, theirs, kwargs, shape):
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(2, 3, *([shape] if isinstance(shape, int) else shape), generator=draw) + 1
    x.requires_grad_()

    def gradients(module):
        y = module(x)
        leaves = x, *module.parameters()
        return torch.autograd.grad(y, leaves, torch.linspace(-1, 2, y.numel()).view(y.shape))

    a, b = ours(shape, **kwargs), theirs(shape, **kwargs)
    for parameter in b.parameters():
        nn.init.normal_(parameter)
    a.load_state_dict(b.state_dict())
    torch.testing.assert_close(gradients(a), gradients(b))


@grid(
    "module,twin", [(fusedops.nn.AddLayerNorm, nn.LayerNorm), (fusedops.nn.AddRMSNorm, nn.RMSNorm)]
)
@pytest.mark.parametrize("shape,affine", [(12, True), ((3, 4), True), ((3, 4), False)], ids=str)
def test_add_modules(module, twin, shape, affine):
    add, plain = (kind(shape, elementwise_affine=affine) for kind in (module, twin))
    x, residual = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    if shape == 12:
        x, residual = torch.randn(2, 12, requires_grad=True), torch.randn(2, 12)
    y, h = add(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, plain(h))


def test_add_module_drops_in_training_only():
    module = fusedops.nn.AddRMSNorm(64, dropout_p=0.5)
    x, zero = torch.ones(8, 64), torch.zeros(8, 64)
    assert (module(x, zero)[1] == 0).any()
    assert not (module.eval()(x, zero)[1] == 0).any()


def test_offset_starts_at_the_plain_norm():
    x = torch.randn(4, 12)
    module = fusedops.nn.RMSNorm(12, offset=1.0)
    torch.testing.assert_close(module(x), nn.RMSNorm(12)(x))
    assert not module.weight.any() and "offset=1.0" in repr(module)


class Subclass(torch.Tensor):
    pass


def test_subclasses_and_modes_see_the_operator():
    x = torch.randn(3, 8).as_subclass(Subclass)
    assert type(layer_norm(x, (8,))) is Subclass
    traced = torch.fx.symbolic_trace(fusedops.nn.LayerNorm(8))
    torch.testing.assert_close(traced(torch.ones(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@given(data=st.data())
def test_modules_are_their_functions(name, data):
    shape = data.draw(shapes(2048).filter(len))
    row = shape[-data.draw(st.integers(1, len(shape))) :]
    x = data.draw(drawn(shape, data.draw(st.sampled_from(FLOATS)))).tensor()
    eps = st.sampled_from([1e-5, 1e-12, 0.0, 0.5, 1, 1e10, -1e-3, math.inf, math.nan])
    options = {"eps": data.draw(eps), "dtype": x.dtype}
    options["elementwise_affine"] = data.draw(st.booleans())
    theirs = getattr(nn, name)(row, **options)
    module, added = (getattr(fusedops.nn, kind)(row, **options) for kind in (name, f"Add{name}"))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    for twin in (module, added):
        twin.load_state_dict(theirs.state_dict(), strict=True)
    function = layer_norm if name == "LayerNorm" else rms_norm
    parameters = [theirs.weight, theirs.bias] if name == "LayerNorm" else [theirs.weight]
    equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    equal(module(x), function(x, row, *parameters, theirs.eps))
    y, h = added(x, x)
    equal(h, x + x)
    equal(y, module(h))
    assert (y.dtype, y.shape) == (theirs(x).dtype, x.shape)
