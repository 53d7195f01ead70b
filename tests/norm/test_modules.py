"""fusedops.nn's norm modules match torch's in results, parameters and state dicts."""

import pytest
import torch
from axes import grid
from torch import nn

import fusedops
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
