"""fusedops.verify compares every fused module with the original and locates errors."""

import pytest
import torch

import fusedops
from fusedops import functional, patch, patched, unpatch, verify
from fusedops.patching.core.swap import fused_modules
from fusedops.patching.modules import linear
from fusedops.patching.yardstick import MORE, Yardstick
from patching.models import loss_cases
from patching.quiet import quietly


@pytest.fixture
def llama(any_size):
    return loss_cases.llama(), {"input_ids": loss_cases.IDS, "labels": loss_cases.IDS}


def test_every_fused_module_has_its_line(llama):
    model, batch = llama
    report = patch(model)
    result = verify(model, batch)
    places = {site.path: site.kinds for site in result.sites}
    norms = {site.path for site in report.fused if site.kind == "norm"}
    linears = {site.path for site in report.fused if site.kind == "linear"}
    assert {path for path, kinds in places.items() if kinds == "norm"} == norms
    assert {path for path, kinds in places.items() if kinds == "linear"} == linears
    assert places["model.layers.0"] == "residual"
    assert places["model.layers.1.self_attn"] == "attention, rotary"
    assert places["model.layers.1.mlp"] == "mlp"
    assert [line.kinds for line in result.whole] == ["outputs", "gradients"]
    assert result.right and all(line.right and line.error < 1e-5 for line in result.sites)
    text = str(result)
    assert text.startswith(f"fusedops.verify  {len(places)} fused modules, 0 beyond rounding")
    assert "model.layers.0.input_layernorm" in text and "furthest off: model.layers" in text


def test_where_an_error_comes_from_is_said(llama, monkeypatch):
    model, batch = llama
    patch(model)
    wrong = model.model.layers[1].mlp.down_proj.weight

    def off(x, weight, *more):
        y = functional.linear(x, weight, *more)
        return y * 1.001 if weight.data_ptr() == wrong.data_ptr() else y

    monkeypatch.setattr(linear, "linear", off)
    result = verify(model, batch)
    assert not result.right
    beyond = [site.path for site in result.sites if not site.right]
    assert beyond == [f"model.layers.1{at}" for at in ("", ".mlp", ".mlp.down_proj")]
    assert result.worst is not None and result.worst.path in beyond
    site = next(site for site in result.sites if site.path == beyond[-1])
    assert site.error == pytest.approx(1e-3, rel=0.1) and site.rounding < 1e-6
    assert "BEYOND ROUNDING" in str(result)
    assert not any(site.right for site in result.whole)


def test_nothing_stays(llama):
    model, batch = llama
    model.train()
    with patched(model):
        before = [type(module) for module in model.modules()], dict(vars(model.config))
        state = torch.get_rng_state()
        verify(model, batch)
        assert ([type(module) for module in model.modules()], dict(vars(model.config))) == before
        assert torch.equal(torch.get_rng_state(), state)
        assert all(m.training for m in model.modules()) and model.lm_head.weight.grad is None
        assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_that_is_not_patched_is_patched_for_as_long(llama):
    model, batch = llama
    result = verify(model, batch)
    assert result.right and len(result.sites) > 20
    assert not fused_modules(model)


def test_weights_that_only_the_original_returns_have_no_part_in_gradients(llama):
    """Eager attention returns its weights too, fused attention does not."""
    model, batch = llama
    model.config._attn_implementation = "eager"
    patch(model, attention=True)
    result = verify(model, batch)
    layers = [site for site in result.sites if site.path.endswith("self_attn")]
    assert result.right and len(layers) == 2, str(result)


def test_any_module_and_a_plain_tensor():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    result = verify(model, torch.randn(4, 8))
    assert result.right and result.sites[0].path == "0" and result.sites[0].kinds == "norm"
    assert isinstance(result, fusedops.VerifyReport)
    unpatch(model)


def test_what_is_no_module_is_an_error():
    with pytest.raises(TypeError, match=r"verify: model must be a torch.nn.Module, got dict"):
        verify({}, torch.zeros(1))
    with pytest.raises(ValueError, match="floating-point results"):
        quietly(verify, torch.nn.Flatten(), torch.zeros(2, 2, dtype=torch.long))


def test_rounding_that_is_right_by_luck_is_seen_again():
    """The exact result, to the bit, in the model and in the copies that are looked at first."""
    x, seeds = torch.randn(64, 64), []

    def results(model, batch):
        off = 1e-6 if len(seeds) > 4 else 0.0  # the model, three copies, the exact one
        seeds.append(off)
        return {"y": x * (1 + off)}

    model = torch.nn.Linear(2, 2)
    before = Yardstick(model, x, results)
    assert before.off({"y": x * (1 + 1.5e-6)}, model) == []
    assert before.off({"y": x * (1 + 3e-6)}, model) == ["y"]
    assert len(seeds) == 5 + MORE


def test_a_model_that_keeps_its_last_run_can_be_verified():
    """RecurrentGemma keeps states, which a deepcopy refuses to copy."""

    class Keeps(torch.nn.Linear):
        def forward(self, x):
            self.state = super().forward(x)
            return self.state

    model = Keeps(4, 4)
    model(torch.randn(2, 4))
    quietly(patch, model, verify=torch.randn(2, 4))


def test_positional_arguments():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x, y):
            return self.norm(x) + y

    result = verify(Two(), (torch.randn(4, 8), torch.randn(4, 8)))
    assert result.right and [site.path for site in result.sites] == ["norm"]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        verify(Two(), (torch.randn(4, 8),))
