"""Sums that leave a layer: normed in the same pass for the module that takes them."""

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from residual_cases import N, PreNorm, close, residual_sites
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedops.patching import patch, residual, unpatch


class Parallel(nn.Module):
    """GPT-NeoX: all sums leave the layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.up = nn.LayerNorm(N), nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, hidden):
        normed = self.norm(hidden)
        hidden = self.up(normed) + self.mix(normed) + hidden
        return hidden


class Stack(nn.Module):
    def __init__(self, layer=PreNorm, count=3):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.last = nn.LayerNorm(N)
        self.between = lambda hidden: hidden
        self.run = lambda layer, hidden: layer(hidden)

    def forward(self, hidden):
        kept = [hidden]
        for layer in self.layers:
            hidden = self.between(self.run(layer, hidden))
            kept.append(hidden)
        return self.last(hidden), *kept


@pytest.fixture
def ahead(monkeypatch):
    """Counts the norms that are made with a sum that leaves."""
    counted, run = Counter(), residual._fused_ahead

    def fused(norm, left, right):
        made = run(norm, left, right)
        counted["ahead"] += made is not None
        return made

    monkeypatch.setattr(residual, "_fused_ahead", fused)
    return counted


def both(change=lambda model: None, layer=PreNorm):
    torch.manual_seed(0)
    model = Stack(layer).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    change(model)
    return copy.deepcopy(model), model, torch.randn(2, 5, N)


def results(model, x, outputs=slice(None)):
    """The outputs and all gradients."""
    x = x.clone().requires_grad_()
    found = model(x)[outputs]
    torch.manual_seed(1)
    loss = sum((y * torch.randn_like(y)).sum() for y in found)
    model.zero_grad()
    loss.backward()
    return *found, x.grad, *(p.grad for p in model.parameters())


def compare(plain, model, x, calls=3, **how):
    for _ in range(calls):
        close(results(model, x, **how), results(plain, x, **how))


@pytest.mark.parametrize("layer", [PreNorm, Parallel])
def test_each_layer_makes_the_norm_of_the_next(layer, ahead):
    plain, model, x = both(layer=layer)
    report = patch(model)
    sites = [s for s in residual_sites(report.fused) if s.path in {f"layers.{i}" for i in range(3)}]
    assert [s.now for s in sites] == ["add_norm"] * 3
    compare(plain, model, x, calls=1)
    assert not ahead  # which norm it is, a forward has to show
    compare(plain, model, x, calls=1)
    assert ahead.total() == 3
    unpatch(model)
    for ours, theirs in zip(model(x), plain(x), strict=True):
        assert torch.equal(ours, theirs)
    assert ahead.total() == 3


@pytest.mark.parametrize("outputs", [slice(1), slice(1, None), slice(2, 3)], ids=str)
def test_gradients_of_a_part_of_the_outputs(outputs, ahead):
    """The sum alone, the norm alone: what has no gradient is 0."""
    plain, model, x = both()
    patch(model)
    compare(plain, model, x, outputs=outputs)
    assert ahead.total() == 6


def in_place(hidden):
    hidden[:, 0] += 1
    return hidden


@pytest.mark.parametrize(
    "between", [in_place, lambda h: h * 2, lambda h: h.detach(), lambda h: h.clone()]
)
def test_what_happens_to_the_sum_is_seen(between, ahead):
    plain, model, x = both(lambda model: setattr(model, "between", between))
    patch(model)
    with torch.no_grad():
        for _ in range(3):
            close(model(x), plain(x))
    assert ahead.total() <= 3  # made once, not taken, and never again


@pytest.mark.parametrize("where", ["layers.1", "layers.1.norm", "last"])
def test_hooks_see_and_change_what_they_did(where, ahead):
    def hook(module, args):
        return (args[0] + 1,)

    plain, model, x = both()
    patch(model)
    compare(plain, model, x, calls=2)
    for one in (plain, model):
        one.get_submodule(where).register_forward_pre_hook(hook)
    compare(plain, model, x)


def test_another_weight_between_the_sum_and_the_norm(ahead):
    def hook(layer, args):
        layer.norm.weight.mul_(1.5)

    plain, model, x = both(lambda model: model.layers[1].register_forward_pre_hook(hook))
    patch(model)
    with torch.no_grad():
        for _ in range(4):
            close(model(x), plain(x))
    assert ahead


def test_another_norm_takes_its_place(ahead):
    plain, model, x = both()
    patch(model)
    compare(plain, model, x, calls=2)
    for one in (plain, model):
        one.layers[1], one.layers[2] = one.layers[2], one.layers[1]
    compare(plain, model, x)
    model.last, plain.last = nn.Identity(), nn.Identity()
    compare(plain, model, x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layers", [{0, 1, 2}, {1}])
def test_checkpoints(reentrant, layers, ahead):
    """A layer that is run again in backward does there what it did."""

    def run(chosen, layer, hidden):
        if layer not in chosen:
            return layer(hidden)
        return checkpoint(layer, hidden, use_reentrant=reentrant)

    plain, model, x = both()
    patch(model)
    compare(plain, model, x, calls=2)
    assert ahead.total() == 3
    for one in (plain, model):
        one.run = partial(run, [one.layers[i] for i in layers])
    compare(plain, model, x)


def test_saved_tensors_elsewhere(ahead):
    plain, model, x = both()
    patch(model)
    with torch.autograd.graph.save_on_cpu():
        compare(plain, model, x)
    assert not ahead


def test_inference_mode_and_back(ahead):
    plain, model, x = both()
    patch(model)
    with torch.inference_mode():
        for _ in range(2):
            close(model(x), plain(x))
    assert not ahead
    compare(plain, model, x)
    assert ahead


def test_gradients_switched_off_at_the_sum(ahead):
    """What was made without a graph is not what a forward with one takes."""

    def run(layer, hidden):
        with torch.no_grad():
            return layer(hidden)

    plain, model, x = both()
    patch(model)
    compare(plain, model, x, calls=2)
    for one in (plain, model):
        one.run = run
    compare(plain, model, x, outputs=slice(1))


@pytest.mark.parametrize("first,second", [(True, False), (False, True)])
def test_autocast(first, second, ahead):
    plain, model, x = both()
    patch(model)
    for _ in range(3):
        for on in (first, second):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                close(model(x), plain(x), torch.bfloat16)


def test_copies_and_pickles(ahead):
    plain, model, x = both()
    patch(model)
    del model.between, model.run, plain.between, plain.run
    model.between = plain.between = nn.Identity()
    model.run = plain.run = Call()
    compare(plain, model, x)
    again = copy.deepcopy(model)
    for p in again.parameters():
        p.data.mul_(2)
    other = pickle.loads(pickle.dumps(plain))
    for p in other.parameters():
        p.data.mul_(2)
    compare(other, again, x)
    compare(plain, model, x)
    compare(plain, pickle.loads(pickle.dumps(model)), x, calls=1)
    outputs = model(x)
    torch.testing.assert_close(pickle.loads(pickle.dumps(outputs)), outputs)


class Call(nn.Module):
    def forward(self, layer, hidden):
        return layer(hidden)


def test_what_is_not_taken_is_not_kept(ahead):
    """One call of a layer alone, whose sum nobody norms."""
    plain, model, x = both()
    patch(model)
    compare(plain, model, x, calls=2)
    before = ahead.total()
    with torch.no_grad():
        for _ in range(3):
            close([model.layers[0](x)], [plain.layers[0](x)])
    assert ahead.total() == before + 1
    compare(plain, model, x)


def test_compile():
    plain, model, x = both()
    patch(model)
    compare(plain, model, x, calls=2)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), plain(x))
