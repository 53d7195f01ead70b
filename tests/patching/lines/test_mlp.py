"""patch rewrites gated MLPs; the new forward equals the original."""

import functools

import pytest
import torch
from axes import grid
from torch import nn
from torch.nn import functional as F

from fusedops.patching import patch, unpatch
from fusedops.patching.lines import mlp
from patching import same
from patching.lines.mlp_cases import (
    CHANGED,
    FUSED,
    LEFT,
    MLP,
    AddedToHalf,
    Llama,
    N,
    Packed,
    PackedCall,
)
from patching.quiet import quietly

transformers = pytest.importorskip("transformers")


@pytest.fixture
def calls(monkeypatch):
    """Returns the fused functions, in the order of their calls: "gated" or "packed"."""
    names = []
    function = mlp._function

    def counted(layer, act, x):
        fused = function(layer, act, x)

        def run(gate, up):
            names.append("packed" if up is None else "gated")
            return fused(gate, up)

        return fused and run

    monkeypatch.setattr(mlp, "_function", counted)
    return names


def build(cls, *args):
    torch.manual_seed(0)
    return nn.Sequential(cls(*args))


def mlps(sites):
    return [site for site in sites if site.kind == "mlp"]


assert_same = functools.partial(same.assert_same, linear=False)


@grid(dtype=[torch.float32, torch.bfloat16], cls=FUSED)
def test_fused(cls, dtype, calls):
    model = build(cls).to(dtype)
    report = assert_same(model, torch.randn(3, 5, N, dtype=dtype))
    assert mlps(report.fused) and not mlps(report.skipped)
    assert {site.path for site in mlps(report.fused)} == {"0"}
    assert {site.now for site in mlps(report.fused)} == {"swiglu"}
    assert calls == ["packed" if cls in (Packed, PackedCall) else "gated"]


@pytest.mark.parametrize("cls", LEFT)
def test_left(cls, calls):
    report = assert_same(build(cls), torch.randn(3, 5, N))
    assert not mlps(report.fused) and not calls


@pytest.mark.parametrize("cls", CHANGED)
def test_what_may_change_in_between_is_activated_where_it_was(cls, calls):
    model, x = build(cls).eval(), torch.randn(2, N)
    with torch.no_grad():
        quietly(patch, model, linear=False)
        got, seen = model(x.clone()), getattr(model[0], "last", x)
        torch.testing.assert_close(got, cls.forward(model[0], x.clone()))
        torch.testing.assert_close(seen, getattr(model[0], "last", x))
    assert calls == (["gated"] if cls is AddedToHalf else [])


ACTIVATIONS = {
    "swiglu": [nn.SiLU(), transformers.activations.SiLUActivation()],
    "geglu": [nn.GELU(), transformers.activations.GELUActivation()],
    "geglu(approximate='tanh')": [
        nn.GELU("tanh"),
        transformers.activations.NewGELUActivation(),
        transformers.activations.FastGELUActivation(),
        transformers.activations.GELUTanh(),
        transformers.activations.AccurateGELUActivation(),
    ],
    "swiglu(alpha=1.702)": [transformers.activations.QuickGELUActivation()],
}


@grid("act,now", [(act, now) for now, acts in ACTIVATIONS.items() for act in acts])
def test_activations(act, now, calls):
    report = assert_same(build(Llama, act), torch.randn(3, 5, N))
    assert [site.now for site in mlps(report.fused)] == [now]
    assert calls == ["gated"]


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return F.silu(x) * self.scale


class WrongGradient(nn.Module):
    """Its backward does not match its values."""

    def forward(self, x):
        return F.silu(x.detach()) + x - x.detach()


class OnlyInEval(nn.Module):
    def forward(self, x):
        return F.relu(x) if self.training else F.silu(x)


class InFloat32(nn.Module):
    def forward(self, x):
        return F.silu(x.float() if x.dtype != torch.float64 else x)


class Clamped(nn.Module):
    """Clamps only in float16, against overflow."""

    def forward(self, x):
        return F.silu(x.clamp(max=100) if x.dtype == torch.float16 else x)


class Limited(nn.Module):
    """For large inputs it is another function."""

    def forward(self, x):
        return F.silu(x).clamp(max=6e4)


class Remembers(nn.Module):
    def forward(self, x):
        self.last = x.detach()
        return F.silu(x)


UNKNOWN = [Clamped(), Limited(), nn.Tanh(), WrongGradient(), OnlyInEval(), InFloat32()]
UNKNOWN.append(transformers.activations.ClippedGELUActivation(-10, 10))
OTHERS = dict.fromkeys(UNKNOWN, "activation is not SiLU, GELU or ReLU") | {
    Remembers(): "its activation changes attributes when called",
    nn.ReLU(): "there is no fused gated function for relu",
    transformers.activations.GELUActivation(use_gelu_python=True): "self.act",
}


@pytest.mark.parametrize(("act", "why"), OTHERS.items(), ids=str)
def test_other_activations_are_left(act, why, calls):
    report = assert_same(build(Llama, act), torch.randn(3, 5, N))
    assert [why in site.reason for site in mlps(report.skipped)] == [True]
    assert not calls


def test_an_attribute_that_changes_is_seen(calls):
    model, x = build(Llama, Gain()), torch.randn(2, N)
    patch(model)
    model(x)
    assert calls == ["gated"]
    model[0].act_fn.scale = 2.0
    torch.testing.assert_close(model(x), Llama.forward(model[0], x))
    assert calls == ["gated"]


def test_an_attribute_of_torchs_own_activation_too(calls):
    model, x = build(Llama, nn.GELU()), torch.randn(2, N)
    patch(model)
    model[0].act_fn.approximate = "tanh"
    assert torch.equal(model(x), Llama.forward(model[0], x)) and not calls
    assert [site.now for site in mlps(patch(model).fused)] == ["geglu(approximate='tanh')"]
    torch.testing.assert_close(model(x), Llama.forward(model[0], x))
    assert calls == ["gated"]


class Loud(nn.Module):
    """Forwards unknown attributes, like FSDP's wrappers, and does something itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        return self.__dict__["_modules"]["inner"] if name == "inner" else getattr(self.inner, name)

    def forward(self, x):
        return self.inner(x) * 2


def test_a_wrapper_around_the_activation_is_called(calls):
    model, x = build(Llama), torch.randn(2, N)
    patch(model)
    silent = Llama.forward(model[0], x)
    model[0].act_fn = Loud(model[0].act_fn)
    assert not torch.allclose(model(x), silent)
    assert torch.equal(model(x), Llama.forward(model[0], x)) and not calls


def test_nested_tensors_run_as_written():
    model = build(Llama)
    patch(model)
    ragged = torch.nested.nested_tensor([torch.randn(2, N), torch.randn(3, N)])
    for got, row in zip(model(ragged).unbind(), ragged.unbind(), strict=True):
        torch.testing.assert_close(got, Llama.forward(model[0], row))


class Star(MLP):
    def forward(self, x, /):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_positional_arguments(calls):
    assert_same(build(Star), torch.randn(2, N))
    assert calls == ["gated"]


def test_hooks_of_every_child_see_their_call(calls):
    model, seen = build(Llama), []
    patch(model)
    for name, child in model[0].named_children():
        child.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(torch.randn(2, N))
    assert sorted(seen) == ["act_fn", "down_proj", "gate_proj", "up_proj"]
    assert not calls  # the activation was called


def test_another_activation_after_patch_is_called(calls):
    model, x = build(Llama), torch.randn(2, N)
    patch(model)
    model[0].act_fn = nn.Tanh()
    torch.testing.assert_close(model(x), Llama.forward(model[0], x))
    assert not calls


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:1],
        lambda x: x[..., :1],
        lambda x: x.mT.contiguous().mT,
    ],
    ids=["float64", "one row", "one column", "transposed"],
)
def test_what_the_kernel_does_not_take_runs_as_written(other, calls):
    """The result's strides are also those of the original lines."""
    gate, up = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    model = build(Llama)
    patch(model)
    act = model[0].act_fn
    for left, right in (gate, other(up)), (other(gate), up), (other(gate), other(up)):
        got = mlp.gated(model[0], act, gate=left, up=right)
        want = act(left) * right
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(got, want)


def test_a_packed_tensor_of_odd_width_runs_as_written():
    model, x = build(Packed), torch.randn(2, 5)
    patch(model)
    with pytest.raises(RuntimeError) as our_error:
        mlp.packed(model[0], model[0].act_fn, x)
    with pytest.raises(RuntimeError) as torch_error:
        gate, up = x.chunk(2, dim=-1)
        F.silu(gate) * up
    assert str(our_error.value) == str(torch_error.value)


def test_an_unread_mlp_is_reported():
    namespace = {}
    exec(
        "def forward(self, x):\n"
        "    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
        namespace,
    )
    model = build(type("Unread", (MLP,), {"forward": namespace["forward"]}))
    assert ["cannot be read" in site.reason for site in mlps(patch(model).skipped)] == [True]


def test_the_activation_keeps_its_class_name_and_unpatches():
    model = build(Llama)
    patch(model)
    act = model[0].act_fn
    assert type(act) is not nn.SiLU and type(act).__name__ == "SiLU" and isinstance(act, nn.SiLU)
    unpatch(model)
    assert type(act) is nn.SiLU
