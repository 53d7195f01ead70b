"""Sums that leave a layer: normed in the same pass for the module that takes them."""

import copy
import gc
import pickle
from collections import Counter
from functools import partial
from threading import Thread
from weakref import ref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.patching import patch, unpatch
from fusedops.patching.core import next_norm as ahead
from fusedops.patching.lines.residual import site as residual
from patching.lines.residual_cases import N, PreNorm, close, residual_sites

pytestmark = pytest.mark.usefixtures("any_size")


class Parallel(nn.Module):
    """GPT-NeoX: all sums leave the layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.up = nn.LayerNorm(N), nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, hidden):
        normed = self.norm(hidden)
        hidden = self.up(normed) + self.mix(normed) + hidden
        return hidden


class Turned(PreNorm):
    """Under autocast one term is bfloat16, the stream float32, in this order."""

    def forward(self, hidden):
        return hidden + self.up(self.norm(hidden))


class Sparse(PreNorm):
    """Its sum has no memory of its own."""

    def forward(self, hidden):
        more = self.up(self.norm(hidden)).to_sparse()
        hidden = hidden.to_sparse() + more
        return hidden


def same(hidden):
    return hidden


def call(layer, hidden):
    return layer(hidden)


class Stack(nn.Module):
    def __init__(self, layer=PreNorm, count=3):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.last = nn.LayerNorm(N)
        self.between, self.run = same, call

    def forward(self, hidden):
        kept = [hidden]
        for layer in self.layers:
            hidden = self.between(self.run(layer, hidden))
            kept.append(hidden)
        return self.last(hidden), *kept


@pytest.fixture
def made(monkeypatch):
    """Counts the norms that are made with a sum that leaves."""
    counted, run = Counter(), residual._fused_ahead

    def fused(norm, left, right):
        found = run(norm, left, right)
        counted["ahead"] += found is not None
        return found

    monkeypatch.setattr(residual, "_fused_ahead", fused)
    return counted


def both(layer=PreNorm):
    """The unpatched model, the patched one, which has been shown what follows, and an input."""
    torch.manual_seed(0)
    plain = Stack(layer).eval()
    for p in plain.parameters():
        nn.init.normal_(p, std=0.5)
    model = copy.deepcopy(plain)
    patch(model)
    x = torch.randn(2, 5, N)
    with torch.no_grad():
        model(x)
    return plain, model, x


def compare(plain, model, x, calls=3):
    with torch.no_grad():
        for _ in range(calls):
            close(model(x), plain(x))


def results(model, x):
    """The outputs, all gradients, and those of what is between the layers."""
    x = x.clone().requires_grad_()
    y, *kept = model(x)
    for h in kept[1:]:
        h.retain_grad()
    torch.manual_seed(1)
    model.zero_grad()
    (y * torch.randn_like(y)).sum().backward()
    return y, *kept, x.grad, *(h.grad for h in kept[1:]), *(p.grad for p in model.parameters())


@pytest.mark.parametrize("layer", [PreNorm, Parallel, Turned])
def test_each_layer_makes_the_norm_of_the_next(layer, made):
    torch.manual_seed(0)
    model = Stack(layer).eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 5, N)
    report = patch(model)
    sites = [s for s in residual_sites(report.fused) if s.path in {f"layers.{i}" for i in range(3)}]
    assert [s.now for s in sites] == ["add_norm"] * 3
    compare(plain, model, x, calls=1)
    assert not made  # which norm it is, a forward has to show
    compare(plain, model, x, calls=1)
    assert made.total() == 3
    unpatch(model)
    for ours, theirs in zip(model(x), plain(x), strict=True):
        assert torch.equal(ours, theirs)
    assert made.total() == 3


@pytest.mark.parametrize("layer", [PreNorm, Parallel])
def test_gradients(layer, made):
    """Of what is between the layers too: a sum and its norm would be one node."""
    plain, model, x = both(layer)
    for _ in range(3):
        close(results(model, x), results(plain, x))
        compare(plain, model, x, calls=1)
    assert made.total() == 9  # without gradients alone


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, made):
    """A reentrant one runs without gradients first."""
    plain, model, x = both()
    for one in (plain, model):
        one.run = partial(checkpoint, use_reentrant=reentrant)
    for _ in range(3):
        close(results(model, x), results(plain, x))


def in_place(hidden):
    hidden[:, 0] += 1
    return hidden


def in_memory(hidden):
    hidden.data = hidden.data * 2
    return hidden


def one_row_less(hidden):
    return hidden[:, 1:]


@pytest.mark.parametrize(
    "between", [in_place, in_memory, one_row_less, torch.clone, torch.neg], ids=lambda f: f.__name__
)
def test_what_happens_to_the_sum_is_seen(between, made):
    plain, model, x = both()
    plain.between = model.between = between
    compare(plain, model, x, calls=8)
    assert 1 <= made.total() <= 3 * ahead.MISSES
    plain.between = model.between = same
    before = made.total()
    compare(plain, model, x)
    assert made.total() == before  # what was not taken so often is not made any more


def test_a_miss_now_and_then_is_none(made):
    plain, model, x = both()
    for _ in range(2 * ahead.MISSES):
        with torch.no_grad():
            close([model.layers[0](x)], [plain.layers[0](x)])
        before = made.total()
        compare(plain, model, x, calls=1)
        assert made.total() == before + 3


@pytest.mark.parametrize("where", ["layers.1", "layers.1.norm", "last"])
def test_hooks_see_and_change_what_they_did(where, made):
    plain, model, x = both()
    for one in (plain, model):
        one.get_submodule(where).register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    compare(plain, model, x)
    assert made


def change_weight(norm):
    norm.weight.mul_(1.5)


def change_place(norm):
    norm.weight.data = norm.weight.data * 1.5


def change_eps(norm):
    norm.eps *= 100


def change_parameter(norm):
    norm.weight = nn.Parameter(norm.weight * 1.5)


@pytest.mark.parametrize("change", [change_weight, change_place, change_eps, change_parameter])
def test_another_norm_between_the_sum_and_the_norm(change, made):
    plain, model, x = both()
    for one in (plain, model):
        one.layers[1].register_forward_pre_hook(lambda layer, args: change(layer.norm))
    compare(plain, model, x, calls=4)
    assert made


def test_a_parametrized_norm_is_not_made_ahead(made):
    class Scale(nn.Module):
        factor = 1.0

        def forward(self, weight):
            return weight * self.factor

    plain, model, x = both()
    for one in (plain, model):
        norm, scale = one.layers[1].norm, Scale()
        nn.utils.parametrize.register_parametrization(norm, "weight", scale)
        one.layers[1].register_forward_pre_hook(
            lambda layer, args, scale=scale: setattr(scale, "factor", scale.factor + 1)
        )
    compare(plain, model, x)


def test_another_norm_takes_its_place(made):
    plain, model, x = both()
    for one in (plain, model):
        one.layers[1], one.layers[2] = one.layers[2], one.layers[1]
    compare(plain, model, x)
    model.last, plain.last = nn.Identity(), nn.Identity()
    compare(plain, model, x)


def test_shards_and_what_is_elsewhere(made):
    """A weight that is not there as it is, until the module's hooks have brought it."""
    plain, model, x = both()
    norm = model.layers[1].norm
    whole, part = norm.weight.data, norm.weight.data[:1].clone()

    def bring(layer, args):
        norm.weight.data = whole

    def drop(layer, args, output):
        norm.weight.data = part

    drop(None, None, None)
    model.layers[1].register_forward_pre_hook(bring)
    model.layers[1].register_forward_hook(drop)
    compare(plain, model, x)
    assert made.total() == 2 * 3


def test_inference_mode(made):
    plain, model, x = both()
    with torch.inference_mode():
        for _ in range(2):
            close(model(x), plain(x))
    assert not made


@pytest.mark.parametrize("first,second", [(True, False), (False, True)])
def test_gradients_on_one_side(first, second, made):
    """Of the sum, or of the norm."""
    plain, model, x = both()

    def run(one):
        with torch.set_grad_enabled(first):
            h = one.layers[0](x)
        with torch.set_grad_enabled(second):
            y = one.layers[1](h)
        if not second:
            return h, y
        return h, y, *torch.autograd.grad(y.sum(), list(one.parameters()), allow_unused=True)

    for _ in range(2):
        close(run(model), run(plain))


@pytest.mark.parametrize("layer", [PreNorm, Turned])
def test_autocast(layer, made):
    plain, model, x = both(layer)
    with torch.no_grad():
        for on in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                close(model(x), plain(x), torch.bfloat16)
        assert made.total() == 9
        for first in (True, False):  # the norm is outside
            for one in (model, plain):
                with torch.autocast("cpu", torch.bfloat16, enabled=first):
                    h = one.layers[0](x)
                with torch.autocast("cpu", torch.bfloat16, enabled=not first):
                    one.found = h, one.layers[1](h)
            close(model.found, plain.found, torch.bfloat16)
            assert model.found[1].dtype == plain.found[1].dtype


def test_copies_and_pickles(made):
    plain, model, x = both()
    again = copy.deepcopy(model)
    for p in again.parameters():
        p.data.mul_(2)
    other = pickle.loads(pickle.dumps(plain))
    for p in other.parameters():
        p.data.mul_(2)
    compare(other, again, x)
    compare(plain, model, x)
    compare(plain, pickle.loads(pickle.dumps(model)), x)
    outputs = model(x)
    torch.testing.assert_close(pickle.loads(pickle.dumps(outputs)), outputs)


def test_what_is_not_taken_is_not_kept(made):
    """A forward that ends at a sum: the norm of it goes with it."""
    _, model, x = both()
    with torch.no_grad():
        h = model.layers[0](x)
    assert made.total() == 1
    waiting = ahead._thread.waiting
    assert waiting.y is not None
    gone = ref(waiting.y)
    del h, waiting
    gc.collect()
    assert gone() is None


def test_threads(made):
    plain, model, x = both()
    wanted, wrong = plain(x)[0].detach(), []

    def run():
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(model(x)[0], wanted, rtol=1e-4, atol=1e-5):
                    wrong.append(1)

    threads = [Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    before = made.total()
    compare(plain, model, x, calls=1)
    assert made.total() == before + 3


def test_verify_leaves_what_was_shown(made):
    plain, model, x = both()
    fusedops.verify(model, x)
    before = made.total()
    compare(plain, model, x, calls=1)
    assert made.total() == before + 3


def test_a_trace_that_begins_at_the_norm(made):
    """It has the norm, not what waited."""
    plain, model, x = both()
    with torch.no_grad():
        for trace in (make_fx, lambda layer: partial(torch.jit.trace, layer)):
            h = model.layers[0](x)
            traced = trace(model.layers[1])(h)
            other = torch.randn_like(h)
            close([traced(other)], [plain.layers[1](other)])


def test_compile():
    plain, model, x = both()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compare(plain, compiled, x)


def dual(model, x):
    with torch.autograd.forward_ad.dual_level():
        y, *_ = model(torch.autograd.forward_ad.make_dual(x, x.cos()))
        return tuple(torch.autograd.forward_ad.unpack_dual(y))


TRANSFORMS = {
    "vmap": lambda model, x: torch.vmap(model)(torch.stack([x, x + 1])),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),))[1],
    "functionalize": lambda model, x: torch.func.functionalize(model)(x),
    "dual": dual,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform, made):
    plain, model, x = both()
    with torch.no_grad():
        for _ in range(2):
            close(transform(model, x), transform(plain, x))
    compare(plain, model, x)


def test_a_transform_that_begins_at_the_norm(made):
    """Its weights are another's; the sum is the same tensor."""
    plain, model, x = both()
    with torch.no_grad():
        for one in (plain, model):
            h, layer = one.layers[0](x), one.layers[1]
            weights = torch.stack([layer.norm.weight, 2 * layer.norm.weight])
            normed = torch.vmap(
                lambda w, norm=layer.norm, h=h: torch.func.functional_call(norm, {"weight": w}, h)
            )
            one.found = normed(weights), layer.norm(h)
    close(model.found, plain.found)


def test_tensors_without_memory(made):
    plain, model, x = both()
    elsewhere = copy.deepcopy(model).to("meta")
    with torch.no_grad():
        for _ in range(2):
            assert [y.shape for y in elsewhere(x.to("meta"))] == [y.shape for y in plain(x)]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(x)
            for _ in range(2):
                assert [y.shape for y in model(fake)] == [y.shape for y in plain(fake)]
    compare(plain, model, x)


def test_sparse_sums(made):
    model = Stack(Sparse).eval()
    model.between = torch.Tensor.to_dense
    plain, x = copy.deepcopy(model), torch.randn(2, 5, N)
    assert "layers.0" in {site.path for site in residual_sites(patch(model).fused)}
    with torch.no_grad():
        for _ in range(3):
            close(model(x), plain(x))


def test_a_forward_kept_from_before_unpatch(made):
    _, model, x = both()
    kept = model.layers[1].norm.forward
    with torch.no_grad():
        h = model.layers[0](x)
        unpatch(model)
        assert torch.equal(kept(h), model.layers[1].norm(h))
