"""Tests shared by code that patch fuses: norm, residual, MLP, linear, rotary, attention."""

import copy

import pytest
import torch
from calling import kernels
from torch import nn

from fusedops.patching import patch, unpatch
from fusedops.testing import yardstick
from patching.lines.attention_cases import LENGTH, N, NanoGPT
from patching.lines.mlp_cases import Packed
from patching.lines.residual_cases import PostNorm, ThreeTerms
from patching.lines.test_rotary import Attention, inputs
from patching.modules.test_linear import Following
from patching.modules.test_norm import LlamaLike
from patching.quiet import quietly
from patching.same import results

# Name: the kind, a module with such sites, and what its forward takes.
SITES = {
    "norm": ("norm", LlamaLike, lambda: [torch.randn(4, 48)]),
    "residual": ("residual", PostNorm, lambda: [torch.randn(4, 32)]),
    "residual of three terms": ("residual", ThreeTerms, lambda: [torch.randn(4, 32)]),
    "mlp": ("mlp", Packed, lambda: [torch.randn(4, 48)]),
    "linear": ("linear", lambda: nn.Linear(48, 48), lambda: [torch.randn(4, 48)]),
    "activated linear": ("linear", Following, lambda: [torch.randn(4, 48)]),
    "rotary": ("rotary", Attention, inputs),
    "attention": ("attention", NanoGPT, lambda: [torch.randn(2, LENGTH, N)]),
    "written attention": (
        "attention",
        lambda: NanoGPT(flash=False),
        lambda: [torch.randn(2, LENGTH, N)],
    ),
}
EVERY = pytest.mark.parametrize("name", SITES)

pytestmark = pytest.mark.usefixtures("any_size")


def made(name):
    """Returns the kind, a module in a model, and arguments."""
    kind, build, args = SITES[name]
    torch.manual_seed(0)
    module = build().eval()
    return kind, module, nn.ModuleList([module]), args()


def only(kind):
    kinds = ("norm", "residual", "mlp", "rotary", "linear", "attention")
    needed = {kind, "norm"} if kind == "residual" else {kind}
    return {other: False for other in kinds if other not in needed}


@pytest.mark.parametrize("name", [name for name in SITES if name != "activated linear"])
def test_an_instance_with_a_forward_of_its_own_is_left(name):
    kind, module, model, args = made(name)
    was, module.forward = type(module), lambda *args: "own"
    reasons = {site.reason for site in quietly(patch, model, **only(kind)).skipped}
    assert "the instance has its own forward" in reasons
    assert type(module) is was and module(*args) == "own"


@EVERY
def test_a_forward_that_was_kept_runs_the_original_after_unpatch(name):
    """accelerate's hooks keep it. Patched again, it is fused again."""
    kind, module, model, args = made(name)
    expected = module(*args)
    quietly(patch, model, **only(kind))
    kept = module.forward
    fused = kernels(lambda: kept(*args))
    unpatch(model)
    assert torch.equal(kept(*args), expected)
    assert fused and not kernels(lambda: kept(*args))
    quietly(patch, model, **only(kind))
    assert kernels(lambda: kept(*args)) == fused


@pytest.mark.parametrize("name", ["residual", "mlp", "linear", "rotary", "attention"])
def test_autocast(name):
    kind, module, model, args = made(name)
    exact = copy.deepcopy(module).double()(*(a.double() for a in args))
    with torch.autocast("cpu", torch.bfloat16):
        eager = module(*args)
        quietly(patch, model, **only(kind))
        actual = module(*args)
        assert kernels(lambda: module(*args))
    assert actual.dtype == eager.dtype
    assert yardstick(actual, eager, exact) is None


@EVERY
def test_one_graph(name):
    kind, module, model, args = made(name)
    quietly(patch, model, **only(kind))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, *args), results(module, *args))
    torch._dynamo.reset()
