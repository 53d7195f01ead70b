"""patch fuses activations after linears in every form in which other people write them."""

import copy
import math
import sys

import pytest
import torch
from axes import grid
from torch import nn
from torch.nn import functional as F

from fusedops.patching import patch, unpatch
from fusedops.patching.core.kinds import only
from fusedops.patching.lines import activated_linear as epilogue
from fusedops.patching.lines import mlp as mlps
from fusedops.patching.modules import linear as linears
from fusedops.patching.modules.activation import function_of
from fusedops.patching.patch import fused_kinds
from fusedops.testing import yardstick
from patching.modules.test_linear import Layer, N, build, outcomes
from patching.same import assert_same

transformers = pytest.importorskip("transformers")


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def erf_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def almost_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.0447 * x**3)))


SHARPNESS = 1.0


def silu_of_a_global(x):
    return x * torch.sigmoid(SHARPNESS * x)


def relu_with_options(x, negative=0.0):
    return torch.where(x > 0, x, negative * x)


calls_of_counted = []


def counted_gelu(x):
    calls_of_counted.append(len(x))
    return F.gelu(x)


def cast_gelu(x):
    """Autocast casts what prelu gets, here an identity."""
    return F.gelu(F.prelu(x, x.new_ones(1)))


class TanhGELU(nn.Module):
    """As in LLMs-from-scratch and minGPT."""

    def forward(self, x):
        return new_gelu(x)


class Sequence(Layer):
    def __init__(self, act=None):
        super().__init__(act)
        self.layers = nn.Sequential(
            nn.Linear(N, 2 * N), act or TanhGELU(), nn.Dropout(0.0), nn.Linear(2 * N, N)
        )

    def forward(self, x):
        return self.fc2(self.fc1(self.layers(x)))


class Chunk(Layer):
    """As DistilBERT: a method that the forward hands to a function."""

    def forward(self, x):
        return transformers.pytorch_utils.apply_chunking_to_forward(self.ff_chunk, 0, 1, x)

    def ff_chunk(self, x):
        x = self.fc1(x)
        x = self.act(x)
        return self.through(x)

    def through(self, x):
        return self.fc2(self.dropout(x))


class Written(Layer):
    """function: of this file, as in older GPTs."""

    def forward(self, x):
        return self.fc2(new_gelu(self.fc1(x)))


class WrittenWithErf(Layer):
    def forward(self, x):
        x = erf_gelu(self.fc1(x))
        return self.fc2(x)


class AsAttribute(Layer):
    def __init__(self, act=None):
        super().__init__(act)
        del self.act
        self.act = new_gelu

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Cast(Layer):
    def forward(self, x):
        return self.fc2(cast_gelu(self.fc1(x)))


class Approximate(Layer):
    def __init__(self, act=None):
        super().__init__(act)
        self.approximate = "tanh"

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class Literal(Layer):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="none"))


class InPlaceOfName(Layer):
    """An expression, as in many tutorials."""

    def forward(self, x):
        x = self.fc1(x)
        x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return self.fc2(x)


class OfTensors(Layer):
    """As LLMs-from-scratch's, with a constant in float32."""

    def forward(self, x):
        h = self.fc1(x)
        h = (
            0.5
            * h
            * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / torch.pi)) * (h + 0.044715 * h.pow(3))))
        )
        return self.fc2(h)
        return self.fc2(h)


class Argument(Layer):
    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h * 0.5 * (1.0 + (h * 0.7071067811865476).erf()))


class Sigmoid(Layer):
    def forward(self, x):
        h = self.fc1(x)
        h = h * torch.sigmoid(h)
        return self.fc2(h)


class OfAGlobal(Layer):
    def forward(self, x):
        h = self.fc1(x)
        h = h * torch.sigmoid(SHARPNESS * h)
        return self.fc2(h)


FOLDED = {
    OfAGlobal: "silu",
    InPlaceOfName: "gelu_tanh",
    OfTensors: "gelu_tanh",
    Argument: "gelu",
    Sigmoid: "silu",
    Sequence: "gelu_tanh",
    Chunk: "gelu",
    Written: "gelu_tanh",
    WrittenWithErf: "gelu",
    AsAttribute: "gelu_tanh",
    Approximate: "gelu_tanh",
    Literal: "gelu",
}


class Almost(Layer):
    def forward(self, x):
        return self.fc2(almost_gelu(self.fc1(x)))


class Global(Layer):
    def forward(self, x):
        return self.fc2(silu_of_a_global(self.fc1(x)))


class Options(Layer):
    def forward(self, x):
        return self.fc2(relu_with_options(self.fc1(x)))


class Counted(Layer):
    def forward(self, x):
        return self.fc2(counted_gelu(self.fc1(x)))


class Closure(Layer):
    def forward(self, x):
        def gelu(x):
            return F.gelu(x) + 0 * self.fc2.weight.sum()

        return self.fc2(gelu(self.fc1(x)))


class NotAfterALinear(Layer):
    def forward(self, x):
        layers = nn.Sequential(self.fc1, self.dropout, self.act, self.fc2)
        return layers(x)


class ReadAgain(Layer):
    def forward(self, x):
        h = self.fc1(x)
        y = 0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0)))
        return self.fc2(y + 0 * h)


class AfterACall(Layer):
    """Something is evaluated between the linear and the expression."""

    def forward(self, x):
        h = self.fc1(x)
        y = self.dropout(x).sum() * 0 + 0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0)))
        return self.fc2(y)


class OfAnotherName(Layer):
    def forward(self, x):
        root = math.sqrt(2.0)
        h = self.fc1(x)
        h = 0.5 * h * (1.0 + torch.erf(h / root))
        return self.fc2(h)


class AlmostWritten(Layer):
    def forward(self, x):
        h = self.fc1(x)
        h = 0.5 * h * (1.0 + torch.erf(h / 1.41))
        return self.fc2(h)


LEFT = [ReadAgain, AfterACall, OfAnotherName, AlmostWritten]
LEFT += [Almost, Global, Options, Counted, Closure, NotAfterALinear]


@pytest.fixture
def calls(recorded):
    """Returns the activations of the fused linears, in the order of their calls."""

    def of(x, weight, bias=None, activation=None):
        return activation

    return recorded(linears, "linear", of, into=recorded(epilogue, "linear", of))


@pytest.fixture(autouse=True)
def everywhere(any_size):
    """Fuses linears on every machine, even where torch's are as fast."""


@grid(dtype=[torch.float32, torch.bfloat16], cls=FOLDED)
def test_the_activation_goes_into_the_linear(cls, dtype, calls):
    model = build(cls).to(dtype)
    outcome = outcomes(model, torch.randn(8, 16, N, dtype=dtype))
    name = FOLDED[cls]
    path = "0.layers.0" if cls is Sequence else "0.fc1"
    assert outcome[path] == f"linear(activation={name!r})"
    assert set(outcome.values()) == {outcome[path], "linear"}
    assert calls == ([name, None, None, None] if cls is Sequence else [name, None])


@pytest.mark.parametrize("cls", LEFT)
def test_the_activation_stays(cls, calls):
    outcome = outcomes(build(cls), torch.randn(3, 4, N))
    assert outcome == {"0.fc1": "linear", "0.fc2": "linear"} and not any(calls)


def test_a_function_that_does_more_is_not_even_run():
    del calls_of_counted[:]
    patch(build(Counted))
    assert not calls_of_counted


@pytest.mark.parametrize("cls", FOLDED)
def test_autocast(cls, calls):
    model, x = build(cls), torch.randn(4, N)
    exact = copy.deepcopy(model).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
        patch(model)
        fused = model(x)
    assert fused.dtype == eager.dtype
    assert FOLDED[cls] in calls
    assert yardstick(fused, eager, exact) is None


def test_a_function_whose_output_autocast_changes_is_called_there(calls):
    model, x = build(Cast), torch.randn(4, N)
    patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert calls == [None, None]  # both linears
    model(x)
    assert calls[2:] == ["gelu", None]


@pytest.mark.parametrize("cls", FOLDED)
def test_compile(cls):
    model, x = build(cls), torch.randn(4, N)
    patch(model)
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("cls", FOLDED)
def test_unpatch_gives_back_what_was(cls, calls):
    model, x = build(cls), torch.randn(4, N)
    expected, classes = model(x), [type(m) for m in model.modules()]
    patch(model)
    assert copy.deepcopy(model)(x).isclose(expected, atol=1e-5).all() and any(calls)
    unpatch(model)
    del calls[:]
    assert torch.equal(model(x), expected) and not calls
    assert [type(m) for m in model.modules()] == classes and type(build(cls)[0]) is cls


@pytest.mark.parametrize("name", ["0", "1"])
def test_hooks_in_a_sequence_see_their_call(name, calls):
    model, seen, x = build(Sequence)[0].layers, [], torch.randn(2, N)
    expected = model(x)
    patch(model)
    assert fused_kinds(model) == ["linear"]
    getattr(model, name).register_forward_hook(lambda *_: seen.append(name))
    torch.testing.assert_close(model(x), expected)
    assert seen == [name] and not any(calls)


def test_a_sequence_that_changes_after_patch():
    model, x = build(Sequence)[0].layers, torch.randn(2, N)
    patch(model)
    model[1] = nn.Tanh()
    model.append(nn.LayerNorm(N))
    expected = model[4](model[3](torch.tanh(F.linear(x, model[0].weight, model[0].bias))))
    torch.testing.assert_close(model(x), expected)


def test_a_lora_adapter_in_a_sequence(calls):
    peft = pytest.importorskip("peft")
    model, x = build(Sequence), torch.randn(2, N)
    expected = model(x)
    patch(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["layers.0"]))
    torch.testing.assert_close(adapted(x), expected)
    assert "gelu_tanh" not in calls


def test_checkpointing_of_a_sequence():
    model, x = build(Sequence)[0].layers, torch.randn(2, N, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    patch(model)
    y = torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)


def test_an_option_that_changes_after_patch(calls):
    model, x = build(Approximate), torch.randn(2, N)
    patch(model)
    model[0].approximate = "none"
    expected = Approximate.forward(copy.deepcopy(model[0]), x)
    torch.testing.assert_close(model(x), expected)
    assert "gelu" in calls
    model[0].approximate = "cubic"
    with pytest.raises(RuntimeError, match="approximate"):
        model(x)


def test_a_function_that_is_replaced_after_patch(calls, monkeypatch):
    model, x = build(Written), torch.randn(2, N)
    patch(model)
    monkeypatch.setattr(sys.modules[__name__], "new_gelu", torch.tanh)
    torch.testing.assert_close(model(x), Written.forward(model[0], x))
    assert "gelu_tanh" not in calls


def test_a_global_number_that_changes_after_patch(calls, monkeypatch):
    model, x = build(OfAGlobal), torch.randn(2, N)
    patch(model)
    monkeypatch.setattr(sys.modules[__name__], "SHARPNESS", 2.0)
    torch.testing.assert_close(model(x), OfAGlobal.forward(copy.deepcopy(model)[0], x))
    assert "silu" not in calls


def test_a_method_of_the_instance_is_called():
    model, x = build(Chunk), torch.randn(2, N)
    patch(model)
    model[0].ff_chunk = lambda x: torch.tanh(x)
    assert torch.equal(model(x), torch.tanh(x))


class Gated(Layer):
    """As litgpt's Gemma."""

    def __init__(self, approximate):
        super().__init__()
        self.up, self.approximate = nn.Linear(N, 2 * N), approximate

    def forward(self, x):
        return self.through(self.fc1(x), self.up(x))

    def through(self, gate, up):
        return self.fc2(F.gelu(gate, approximate=self.approximate) * up.clone())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gate_with_an_option_in_a_method(approximate, recorded):
    calls = recorded(mlps, "_function", lambda *_: "gated")
    model = build(Gated, approximate)
    report = assert_same(model, torch.randn(3, 5, N), **only("mlp"))
    name = "geglu" + ("(approximate='tanh')" if approximate == "tanh" else "")
    assert [site.now for site in report.fused if site.kind == "mlp"] == [name]
    assert calls


def test_only_functions_of_modules_are_kept():
    def gelu(x):
        return F.gelu(x)

    model = build(AsAttribute)
    patch(model)
    model[0].act = gelu
    patch(model)
    assert function_of(gelu) is None and function_of(new_gelu).name == "gelu_tanh"
