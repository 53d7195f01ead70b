"""Parts that torch.compile has wrapped, and modules whose truth value is false or an error."""

import sys

import pytest
import torch
from torch import nn

import fusedops
from fusedops.patching.core.swap import fused_modules
from patching.quiet import quietly

pytest.importorskip("transformers")
from patching.models.attention_models import batch, build

pytestmark = pytest.mark.usefixtures("any_size")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def labelled(name):
    kwargs = batch(name)
    ids = kwargs["decoder_input_ids" if name == "t5" else "input_ids"]
    return {**kwargs, "labels": ids.clone()}


def trained(model, name):
    """Returns the loss, and each parameter's gradient by its name without the wrappers'."""
    model.zero_grad()
    loss = model(**labelled(name)).loss
    loss.backward()
    named = {n.replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()}
    return loss.detach(), {n: g.clone() for n, g in named.items() if g is not None}


def compiled(module):
    return torch.compile(module, backend="eager")


def with_head(model):
    model.lm_head = compiled(model.lm_head)
    return model


def with_layers(model):
    for module in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for i, layer in enumerate(module):
            module[i] = compiled(layer)
    return model


def with_regions(model):
    return pytest.importorskip("accelerate.utils").compile_regions(model, backend="eager")


@pytest.mark.parametrize(
    "wrap,name",
    [*((with_head, name) for name in ("llama", "gpt2", "t5")),
     (with_layers, "llama"), (with_regions, "llama")],
)  # fmt: skip
def test_results_are_those_without_patch(wrap, name):
    expected = trained(build(name), name)
    model = wrap(build(name))
    report = fusedops.patch(model)
    torch.testing.assert_close(trained(model, name), expected, rtol=1e-4, atol=1e-4)
    (loss,) = [s for s in report.fused + report.skipped if s.kind == "loss"]
    assert loss.path == "lm_head"
    if name != "t5":
        assert loss.now == ("linear_cross_entropy" if wrap is with_layers else "cross_entropy")
    if loss.now == "cross_entropy":
        assert "OptimizedModule" in loss.reason
    fusedops.unpatch(model)
    assert not fused_modules(model)
    torch.testing.assert_close(trained(model, name), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_compiled_head_in_patch_with_verify(name):
    fusedops.patch(with_head(build(name)), verify=labelled(name))


def test_low_latency_with_a_compiled_head():
    options = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4}
    expected = build("llama").generate(**batch("llama"), **options)
    model = with_head(build("llama"))
    fusedops.low_latency(model, compile=False)
    assert torch.equal(model.generate(**batch("llama"), **options), expected)


def test_verify_sees_into_parts_that_were_compiled_before():
    """Their graph has no hooks."""
    model = with_head(build("llama"))
    fusedops.patch(model)
    trained(model, "llama")
    report = fusedops.verify(model, labelled("llama"))
    assert report.right
    assert "lm_head._orig_mod" in {site.path for site in report.sites}


# The truth of a module


def truth(self):
    """In place of `nn.Module.__bool__`: raises in fusedops' code, as a user's class might."""
    if sys._getframe(1).f_globals["__name__"].partition(".")[0] == "fusedops":
        raise TypeError(f"{type(self).__name__} has no truth value")
    return len(self) > 0 if hasattr(self, "__len__") else True


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert", "t5"])
def test_nothing_asks_for_the_truth_of_a_module(name, monkeypatch):
    monkeypatch.setattr(nn.Module, "__bool__", truth, raising=False)
    model, given = build(name), batch(name)
    report = quietly(fusedops.patch, model)
    assert report.counts(given).sites
    assert quietly(fusedops.verify, model, given).right
    fusedops.unpatch(model)
    assert fusedops.quantize(model, "int8").fused
    if name == "llama":
        quietly(fusedops.profile, lambda: model(**given), model=model, steps=2, warmup=1)


class Empty(nn.Linear):
    """A linear that is false."""

    def __len__(self):
        return 0


class Falsy(nn.RMSNorm):
    def __bool__(self):
        raise TypeError("no truth")


class Layer(nn.Module):
    def __init__(self, linear, norm):
        super().__init__()
        self.norm, self.up, self.gate, self.down = (
            norm(32),
            linear(32, 64),
            linear(32, 64),
            linear(64, 32),
        )
        self.act = nn.SiLU()

    def forward(self, x):
        residual = x
        x = self.down(self.act(self.gate(x)) * self.up(x))
        x = residual + x
        return self.norm(x)


def test_modules_that_are_false_are_fused_like_others():
    model, plain = nn.Sequential(Layer(Empty, Falsy)), nn.Sequential(Layer(nn.Linear, nn.RMSNorm))
    model.load_state_dict(plain.state_dict())
    report, plain_report = fusedops.patch(model), fusedops.patch(plain)
    assert [(s.path, s.kind, s.now) for s in report.fused] == [
        (s.path, s.kind, s.now) for s in plain_report.fused
    ]
    x = torch.randn(3, 32)
    assert torch.equal(model(x), plain(x))
    assert {s.kind for s in report.counts(x).sites} == {s.kind for s in report.fused}
