"""patch fuses linear layers with the activations after them, and leaves layers that do more."""

import copy

import pytest
import torch
from axes import grid
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from fusedops.patching import patch
from fusedops.patching.lines import activated_linear as epilogue
from fusedops.patching.modules import linear as linears
from fusedops.testing import yardstick
from patching.quiet import quietly
from patching.same import assert_same

transformers = pytest.importorskip("transformers")
Conv1D = transformers.pytorch_utils.Conv1D
N = 48


class Layer(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(N, 2 * N), nn.Linear(2 * N, N, bias=False)
        self.act = act or nn.GELU()
        self.dropout = nn.Dropout(0.0)


class UnitNorm(nn.Module):
    """A site that cannot be fused: neither a LayerNorm nor an RMSNorm."""

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


class Inline(Layer):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Following(Layer):
    """BERT, GPT-2."""

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        return self.fc2(x)


class InReturn(Layer):
    def forward(self, x):
        hidden = self.fc1(x)
        return self.fc2(self.dropout(self.act(hidden)))


class Functional(Layer):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Attribute(Layer):
    """The activation is a function on the instance."""

    def __init__(self, act=None):
        super().__init__(act)
        del self.act
        self.act = F.gelu

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Turned(Layer):
    """GPT-2's linears, with transposed weights."""

    def __init__(self, act=None):
        super().__init__(act)
        self.fc1, self.fc2 = Conv1D(2 * N, N), Conv1D(N, 2 * N)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


FOLDED = [Inline, Following, InReturn, Functional, Attribute, Turned]


class BothUsed(Layer):
    """The activated tensor is used again."""

    def forward(self, x):
        hidden = self.fc1(x)
        return self.fc2(self.act(hidden) + hidden)


class Between(Layer):
    """Something runs between the two, which may see or change what fc1 sees."""

    def forward(self, x):
        hidden = self.fc1(x)
        x = self.dropout(x)
        return self.fc2(self.act(hidden)) + x


class Second(Layer):
    """The linear would be called after another module that was called after it."""

    def forward(self, x):
        hidden = self.fc1(x)
        return self.fc2(self.dropout(hidden.new_ones(1)) * self.act(hidden))


LEFT = [BothUsed, Between, Second]


@pytest.fixture
def calls(recorded):
    """Returns the activations of the fused linears, in the order of their calls."""

    def of(x, weight, bias=None, activation=None):
        return activation

    return recorded(linears, "linear", of, into=recorded(epilogue, "linear", of))


@pytest.fixture(autouse=True)
def everywhere(any_size):
    """Fuses linears on every machine, even where torch's are as fast."""


def build(cls, *args):
    torch.manual_seed(0)
    return nn.Sequential(cls(*args))


def outcomes(model, x):
    """Returns what became of each site, where patching changes no result."""
    report = assert_same(model, x, mlp=False)
    return {site.path: site.now or site.reason for site in [*report.fused, *report.skipped]}


@grid(dtype=[torch.float32, torch.bfloat16], cls=FOLDED)
def test_the_activation_goes_into_the_linear(cls, dtype, calls):
    outcome = outcomes(build(cls).to(dtype), torch.randn(3, 5, N, dtype=dtype))
    assert outcome == {"0.fc1": "linear(activation='gelu')", "0.fc2": "linear"}
    assert calls == ["gelu", None]


@pytest.mark.parametrize("cls", LEFT)
def test_the_activation_stays(cls, calls):
    outcome = outcomes(build(cls), torch.randn(3, 4, N))
    assert outcome == {"0.fc1": "linear", "0.fc2": "linear"}
    assert calls == [None, None]


@grid(
    "act,name",
    [
        (nn.ReLU(), "relu"),
        (nn.SiLU(), "silu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (transformers.activations.NewGELUActivation(), "gelu_tanh"),
        (transformers.activations.GELUActivation(), "gelu"),
        (transformers.activations.QuickGELUActivation(), None),
        (nn.Tanh(), None),
    ],
)
def test_activations(act, name, calls):
    outcomes(build(Inline, act), torch.randn(3, 5, N))
    assert calls == [name, None]


class Scaled(nn.Linear):
    """A linear with its own forward."""

    def forward(self, x):
        return super().forward(x) * 2


class Written(nn.Linear):
    """Falcon's: computes what nn.Linear computes, in other lines."""

    def forward(self, x):
        hidden = x @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


@grid(bias=[True, False], width=[N, 2 * N])
def test_a_linear_in_other_lines_is_fused(bias, width, calls):
    model = nn.Sequential(Written(N, width, bias=bias))
    assert outcomes(model, torch.randn(3, 5, N)) == {"0": "linear"}
    assert calls == [None]


class Grown(nn.Module):
    """Looks like Conv1D, but adds something."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(N, N)), nn.Parameter(torch.randn(N))

    def forward(self, x):
        return x @ self.weight + self.bias + x.sum() * 1e-3


class Frozen(Grown):
    """Looks like Conv1D, but has other gradients."""

    def forward(self, x):
        return x @ self.weight.detach() + self.bias


class HalfGradient(Grown):
    def forward(self, x):
        y = x @ self.weight + self.bias
        return 0.5 * (y + y.detach())


def skipped(model):
    return [site.reason for site in quietly(patch, model).skipped if site.kind == "linear"]


def test_a_linear_with_a_forward_of_its_own_is_left():
    assert skipped(nn.Sequential(Scaled(N, N))) == ["it does not compute x @ weight.T + bias"]


@pytest.mark.parametrize("cls", [Grown, Frozen, HalfGradient])
def test_what_only_looks_like_a_linear_is_left(cls):
    model = nn.Sequential(cls())
    assert skipped(model) == [] and type(model[0]) is cls


def test_a_machine_on_which_torch_is_as_fast(monkeypatch, calls):
    """Only linears with an activation are fused there, and that is no failure."""
    monkeypatch.setattr(linears, "linear_loses", lambda *_: "torch's is as fast")
    model = build(Inline)
    report = patch(model, strict=True)
    assert {(s.path, s.now) for s in report.fused} == {("0.fc1", "linear(activation='gelu')")}
    (kept,) = report.kept
    assert (kept.path, kept.kind, kept.reason) == ("0.fc2", "linear", "torch's is as fast")
    assert "(1 kept: torch's is as fast)" in report.summary
    model(torch.randn(2, N))
    assert calls == ["gelu"]


@pytest.mark.parametrize("name", ["fc1", "act"])
def test_hooks_see_their_call(name, calls):
    model, seen, x = build(Inline), [], torch.randn(2, N)
    patch(model)
    getattr(model[0], name).register_forward_hook(lambda *_: seen.append(name))
    torch.testing.assert_close(model(x), Inline.forward(model[0], x))
    assert seen == [name, name]
    assert "gelu" not in calls


def test_a_child_that_is_replaced_after_patch_is_called(calls):
    """PEFT replaces the linears that it adapts."""
    model, x = build(Inline), torch.randn(2, N)
    patch(model)
    model[0].fc1 = nn.Sequential(model[0].fc1)
    torch.testing.assert_close(model(x), Inline.forward(model[0], x))
    assert "gelu" not in calls


def test_a_parametrized_weight_is_computed_each_time(calls):
    model, x = nn.Sequential(nn.Linear(N, N)), torch.randn(2, N)
    patch(model)
    parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))
    assert not calls


def moved(fc):
    """Turns the bias into a plain tensor, as MAML does."""
    bias = fc.bias.detach() + 1
    del fc.bias
    fc.bias = bias


@pytest.mark.parametrize(
    "change",
    [
        lambda fc: parametrize.register_parametrization(fc, "bias", nn.Tanh()),
        lambda fc: prune.l1_unstructured(fc, "bias", 3),
        lambda fc: nn.utils.parametrizations.weight_norm(fc, "weight"),
        moved,
    ],
    ids=["parametrized", "pruned", "weight norm", "moved"],
)
@pytest.mark.parametrize("early", [True, False])
def test_a_parameter_that_is_computed(change, early):
    model, x = build(Inline), torch.randn(2, N)
    if early:
        change(model[0].fc1)
    patch(model)
    if not early:
        change(model[0].fc1)
    fc1, fc2 = model[0].fc1, model[0].fc2
    expected = F.linear(F.gelu(F.linear(x, fc1.weight, fc1.bias)), fc2.weight)
    torch.testing.assert_close(model(x), expected)


def test_a_class_on_top_with_another_forward_is_called():
    model, x = build(Inline), torch.randn(2, N)
    patch(model)

    class Twice(type(model[0].fc1)):
        def forward(self, x):
            return super().forward(x) * 2

    model[0].fc1.__class__ = Twice
    fc1, fc2 = model[0].fc1, model[0].fc2
    expected = F.linear(F.gelu(2 * F.linear(x, fc1.weight, fc1.bias)), fc2.weight)
    torch.testing.assert_close(model(x), expected)


class Property(nn.Linear):
    """Computes its weight in a property."""

    def __init__(self, *args):
        super().__init__(*args)
        self.own = nn.Parameter(self.weight.detach())

    weight = property(lambda self: self.own * 3, lambda self, value: None)


class Loud(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class Watching(nn.Linear):
    def forward(self, x):
        self.seen = x
        return super().forward(x)


class Tripled(nn.Linear):
    def reset_parameters(self):
        for parameter in self._parameters.values():
            nn.init.normal_(parameter)

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value * 3 if name == "weight" else value


class Switched(Grown):
    def __init__(self):
        super().__init__()
        self.factor = 1

    def forward(self, x):
        y = x @ self.weight + self.bias
        return y if self.factor == 1 else y * self.factor


def test_a_weight_that_is_computed_when_it_is_read():
    model, x = nn.Sequential(Tripled(N, N), nn.LayerNorm(N)), torch.randn(2, N)
    expected = model(x)
    patch(model)
    torch.testing.assert_close(model(x), expected)


def test_an_attribute_that_the_forward_reads_may_change():
    model, x = nn.Sequential(Switched()), torch.randn(2, N)
    assert patch(model).coverage["linear"] == (1, 1)
    model[0].factor = 2
    torch.testing.assert_close(model(x), 2 * (x @ model[0].weight + model[0].bias))


@pytest.mark.parametrize("cls", [Loud, Watching])
def test_linears_that_do_more_do_it(cls):
    model, x = build(Inline), torch.randn(2, N)
    model[0].fc1 = cls(N, 2 * N)
    patch(model)
    fc1, fc2 = model[0].fc1, model[0].fc2
    once = F.linear(x, fc1.weight, fc1.bias) * (2 if cls is Loud else 1)
    torch.testing.assert_close(model(x), F.linear(F.gelu(once), fc2.weight))
    assert cls is Loud or fc1.seen is x


@pytest.mark.parametrize(
    "module",
    [
        nn.LazyLinear(4),
        torch.jit.script(nn.Linear(4, 4)),
        torch.jit.trace(nn.GELU(), torch.ones(4)),
    ],
    ids=["lazy", "scripted", "traced"],
)
def test_modules_that_cannot_be_read_are_left(module):
    model = nn.Sequential(module, nn.LayerNorm(4))
    x = torch.randn(2, 4)
    assert patch(model).coverage["norm"] == (1, 1)
    torch.testing.assert_close(model(x), F.layer_norm(module(x), (4,)))


class Accumulates(Layer):
    """`x += ...` reads x."""

    def forward(self, x):
        hidden = self.fc1(x)
        hidden = hidden + self.act(self.fc1(x))
        hidden += self.act(hidden)
        return self.fc2(hidden)


def test_an_addition_in_place_reads_its_target():
    model, x = build(Accumulates), torch.randn(2, N)
    patch(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), Accumulates.forward(model[0], x))


def test_a_failed_patch_leaves_what_an_earlier_one_has_fused():
    model = nn.Sequential(Inline(), UnitNorm())
    patch(model, mlp=False, norm=False)
    before = [type(m) for m in model.modules()]
    with pytest.raises(RuntimeError, match="UnitNorm"):
        patch(model, strict=True)
    assert [type(m) for m in model.modules()] == before


class Doubled(torch.Tensor):
    """A tensor with its own F.linear, as quantized weights have."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            return F.linear(*(a.as_subclass(torch.Tensor) for a in args)) * 2
        return super().__torch_function__(function, types, args, kwargs)


def test_a_tensor_subclass_runs_its_own_linear(calls):
    model, x = nn.Sequential(nn.Linear(N, N)), torch.randn(2, N)
    expected = model(x) * 2
    patch(model)
    torch.testing.assert_close(model(x.as_subclass(Doubled)).as_subclass(torch.Tensor), expected)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Doubled))
    torch.testing.assert_close(model(x).as_subclass(torch.Tensor), expected)
    assert not calls


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Embedding(8, N), nn.Linear(N, 8, bias=False))
    model[1].weight = model[0].weight
    patch(model)
    assert model[1].weight is model[0].weight
    model(torch.arange(3)).sum().backward()
    assert model[0].weight.grad is model[1].weight.grad is not None


@grid(wrong=[torch.randn(2, N + 1), torch.arange(N), torch.randn(2, N).double()])
def test_bad_input_gets_the_error_that_nn_linear_gives(wrong):
    model = nn.Sequential(nn.Linear(N, N))
    with pytest.raises((RuntimeError, TypeError)):
        model(wrong)
    patch(model)
    with pytest.raises((RuntimeError, TypeError)):
        model(wrong)


def test_autocast(calls):
    model, x = build(Inline), torch.randn(4, N)
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
        patch(model)
        fused = model(x)
    assert calls == ["gelu", None]
    assert fused.dtype == eager.dtype == torch.bfloat16
    exact = Inline.forward(copy.deepcopy(model[0]).double(), x.double())
    assert yardstick(fused, eager, exact) is None


def test_switched_off(calls):
    model = build(Inline)
    report = quietly(patch, model, linear=False)
    assert not report.fused and not calls
    assert type(model[0]) is Inline and type(model[0].fc1) is nn.Linear
