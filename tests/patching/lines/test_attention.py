"""patch fuses attention in a model's own code, and leaves lines whose scores other code sees."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from axes import grid
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedops.patching import patch, patched, unpatch
from fusedops.patching.core.calls import BY_SIZE, FLOAT64
from fusedops.patching.core.kinds import only
from fusedops.patching.lines.attention.product import BLIND, UNREAD
from fusedops.patching.patch import look_again
from fusedops.testing import yardstick
from patching.lines import attention_cases as cases
from patching.lines.attention_cases import (
    FUSED,
    HEADS,
    LENGTH,
    N,
    NanoGPT,
    Projected,
    attention_rows,
    inputs,
)
from patching.quiet import quietly
from patching.same import assert_same, results

ALONE = only("attention")
TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.fixture(autouse=True)
def every_size(any_size):
    torch.manual_seed(0)


def calls(report, *args):
    """(calls by a kernel, calls by torch's code, why) of all attention in one run."""
    counts = report.counts(args)
    return counts.kernel, counts.fallback, counts.reasons


@grid(name=FUSED, dtype=[torch.float32, torch.bfloat16])
def test_fused(name, dtype):
    model, x = FUSED[name]().to(dtype).eval(), inputs(dtype)
    report = assert_same(model, x, **ALONE)
    assert not attention_rows([*report.kept, *report.skipped])
    assert {site.now for site in attention_rows(report.fused)} == {"scaled_dot_product_attention"}
    assert calls(patch(model, **ALONE), x) == (1, 0, {})


def mask_of(kind, dtype=torch.float32, heads=1):
    seen = torch.rand(2, heads, LENGTH, LENGTH) < 0.7
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    if kind == "padding":
        seen = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]]))[:, None, None]
    if kind == "causal":
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    if kind in ("bool", "padding", "causal"):
        return seen
    hidden = {"smallest": torch.finfo(dtype).min, "numbers": -3.0}.get(kind, -math.inf)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


@grid(
    kind=["bool", "padding", "smallest", "numbers", "infinite"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_masks_of_torchs_function(kind, dtype):
    compare_with_mask(cases.Vit().to(dtype), mask_of(kind, dtype))


@grid(kind=["smallest", "numbers", "infinite"], dtype=[torch.float32, torch.bfloat16])
def test_numbers_that_lines_add(kind, dtype):
    compare_with_mask(cases.Vit(False).to(dtype), mask_of(kind, dtype))


@grid(cls=[cases.Function, cases.OneHead], kind=["bool", "padding", "causal"])
def test_bools_that_lines_fill(cls, kind):
    mask = mask_of(kind)
    compare_with_mask(cls().eval(), mask[:, 0].expand(2, -1, -1) if cls is cases.OneHead else mask)


@grid(cls=[cases.Shown, cases.Hidden])
def test_bools_of_torch_where(cls):
    compare_with_mask(cls().eval(), mask_of("bool"))


def test_weights_over_queries_stay_as_written():
    model, x = cases.OverQueries().eval(), inputs()
    eager = model(x)
    report = patch(model, **ALONE)
    assert torch.equal(model(x), eager)
    assert calls(report, x) == (0, 1, {UNREAD: 1})


def test_a_first_call_without_tokens_decides_nothing(caplog):
    class Fresh(NanoGPT):
        pass

    model, x = Fresh(flash=False).eval(), inputs()
    report = patch(model, **ALONE)
    assert model(x[:, :0]).shape == (2, 0, N)
    assert not caplog.records
    assert calls(report, x) == (1, 0, {})


def test_lines_run_as_written_under_torch_func():
    model, x = NanoGPT(flash=False).eval(), torch.randn(3, 2, LENGTH, N)
    eager = torch.func.vmap(model)(x)
    patch(model, **ALONE)
    assert torch.equal(torch.func.vmap(model)(x), eager)


def compare_with_mask(model, mask):
    x = inputs(next(model.parameters()).dtype)
    exact_mask = mask.double() if mask.is_floating_point() else mask
    eager = results(model, x, mask)
    exact = results(copy.deepcopy(model).double(), x.double(), exact_mask)
    report = patch(model, **ALONE)
    for got, *others in zip(results(model, x, mask), eager, exact, strict=True):
        assert yardstick(got, *others) is None
    assert calls(report, x, mask) == (1, 0, {})


class Grouped(Projected):
    def forward(self, x, gqa=True):
        q, k, v = self.operands(x)
        y = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=gqa, scale=0.3)
        return y.transpose(1, 2).flatten(2)


def test_grouped_heads():
    model = Grouped()
    assert_same(model, inputs(), **ALONE)
    report = patch(model, **ALONE)
    assert calls(report, inputs()) == (1, 0, {})
    with pytest.raises(RuntimeError, match="must match the size"):  # as torch's function does
        model(inputs(), gqa=False)


@grid(flash=[True, False])
def test_autocast(flash):
    model, x = NanoGPT(flash), inputs()
    exact = model.double()(x.double())
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
        report = patch(model, **ALONE)
        got = model(x)
        assert calls(report, x) == (1, 0, {})
    assert got.dtype == eager.dtype and yardstick(got, eager, exact) is None


def test_a_float_mask_is_added_in_float32_under_autocast():
    """Its smallest number would become -inf in bfloat16, and the mean of the values NaN."""
    model, x, mask = cases.Vit(False), inputs(), mask_of("smallest")
    mask[0, :, 3] = torch.finfo(torch.float32).min
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, mask)
        patch(model, **ALONE)
        torch.testing.assert_close(model(x, mask), expected, rtol=2e-2, atol=2e-2)


@grid(flash=[True, False])
def test_dropout_has_the_same_mean_and_its_own_mask(flash):
    model, x = NanoGPT(flash, p=0.3).train(), inputs()
    report = patch(model, **ALONE)
    with torch.no_grad():
        draws = torch.stack([model(x) for _ in range(600)])
        mean = model.eval()(x)
    model.train()
    assert not torch.equal(draws[0], draws[1]) and calls(report, x)[0] == 1
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - mean).abs() / error).square().mean() < 1.3  # 1 if the mean is right
    torch.manual_seed(3)
    first = results(model, x)
    torch.manual_seed(3)
    assert all(map(torch.equal, first, results(model, x)))


@grid(flash=[True, False], reentrant=[True, False])
def test_checkpointing_draws_the_same_mask_again(flash, reentrant):
    model, x = NanoGPT(flash, p=0.3).train(), inputs().requires_grad_()
    patch(model, **ALONE)
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(5)
        x.grad = None
        run(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_hook_on_the_dropout_or_the_softmax_gets_weights():
    for name, child in (("nanoGPT by hand", "drop"), ("einsum", "attend")):
        model, x = FUSED[name]().eval(), inputs()
        expected = model(x)
        report = patch(model, **ALONE)
        sums = torch.ones(2, HEADS, LENGTH)
        hook = getattr(model, child).register_forward_hook(
            lambda m, args, y, sums=sums: torch.testing.assert_close(y.sum(-1), sums)
        )
        assert torch.equal(model(x), expected)
        assert calls(report, x) == (0, 1, {UNREAD: 1})
        hook.remove()
        assert calls(report, x) == (1, 0, {})


def test_hooks_adapters_and_frozen_weights_around_it():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(NanoGPT(False), NanoGPT())
    config = peft.LoraConfig(r=4, target_modules=["qkv"], init_lora_weights=False)
    model, x = peft.get_peft_model(model, config).eval(), inputs()
    before = trained(model, x)
    report = quietly(patch, model, **ALONE)
    assert len(attention_rows(report.fused)) == 4 and len(before) == 4
    for got, expected in zip(trained(model, x), before, strict=True):
        torch.testing.assert_close(got, expected)
    unpatch(model)
    assert all(map(torch.equal, trained(model, x), before))


def trained(model, x):
    needed = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(model(x).square().sum(), needed)


UNREAD_CODE = "def unread(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)"
SCOPE = {"F": F, "__name__": __name__}
exec(UNREAD_CODE, SCOPE)
unread = SCOPE["unread"]


class Unreadable(Projected):
    def forward(self, x):
        return unread(*self.operands(x))


def test_a_function_that_cannot_be_read_has_a_row():
    rows = attention_rows(quietly(patch, Unreadable(), **ALONE).kept)
    reason = "in unread: the source of its forward cannot be read"
    assert [site.reason for site in rows] == [reason]


# Calls that run the model's lines


class Lines(Projected):
    """Lines whose meaning the arguments choose."""

    def forward(self, x, scale=0.5, mask=None, fill=-math.inf, bias=None, p=0.0):
        q, k, v = self.operands(x)
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(mask, fill)
        if bias is not None:
            scores = scores + bias
        scores = scores * scale
        weights = F.dropout(F.softmax(scores, -1), p, self.training)
        return weights @ v


ROWS = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool)
ROWS[1, :, 5] = True
OTHER_CALLS = {
    "negative": ({"scale": -0.5}, UNREAD),
    "zero": ({"scale": 0.0}, UNREAD),
    "scale of a tensor": ({"scale": torch.full((LENGTH,), 0.3)}, UNREAD),
    "scale after a bias": ({"bias": torch.randn(LENGTH, LENGTH)}, UNREAD),
    "visible fill": ({"mask": TRIANGLE, "fill": -3.0}, UNREAD),
    "small scale of a fill": ({"mask": TRIANGLE, "fill": -2e4, "scale": 1e-4}, UNREAD),
    "no key": ({"mask": ROWS}, BLIND),
    "no key, a number": ({"mask": ROWS, "fill": -1e9}, BLIND),
    "a bias of bools": ({"bias": TRIANGLE}, UNREAD),
    "a wider mask": ({"mask": torch.zeros(3, 1, 1, 1, 1, dtype=torch.bool)}, UNREAD),
}


@grid(name=OTHER_CALLS)
def test_a_call_that_does_not_fit_runs_the_lines(name):
    kwargs, reason = OTHER_CALLS[name]
    model, x = Lines(), inputs()
    expected = model(x, **kwargs)
    report = patch(model, **ALONE)
    torch.testing.assert_close(model(x, **kwargs), expected, rtol=0, atol=0, equal_nan=True)
    counts = report.counts({"x": x, **kwargs})
    assert counts.kernel == 0 and counts.reasons == {reason: 1}


@grid(
    kwargs=[{}, {"mask": TRIANGLE}, {"mask": TRIANGLE, "fill": -1e9}, {"scale": torch.tensor(0.7)}]
)
def test_a_call_that_fits_runs_a_kernel(kwargs):
    model, x = Lines(), inputs()
    expected = model(x, **kwargs)
    report = patch(model, **ALONE)
    got = model(x, **kwargs)
    torch.testing.assert_close(got, expected)
    assert got.is_contiguous()  # as a product is; the caller may view it
    assert report.counts({"x": x, **kwargs}).kernel == 1


def test_a_triangle_becomes_causal(recorded):
    from fusedops.patching.lines.attention import product

    seen = recorded(product, "attention", lambda *args, causal, bias, **more: (causal, bias))
    model = Lines()
    patch(model, **ALONE)
    masks = TRIANGLE, torch.zeros_like(TRIANGLE), TRIANGLE.mT
    for _ in range(2):  # the first calls also run a trial
        seen.clear()
        for mask in masks:
            model(inputs(), mask=mask)
    assert seen[:2] == [(True, None), (False, None)] and torch.equal(seen[2][1], ~TRIANGLE.mT)
    assert len(seen) == 3


@grid(flash=[True, False])
def test_float64_and_small_calls_run_torchs_code(flash, monkeypatch):
    from fusedops.patching.core import thresholds

    model, x = NanoGPT(flash), inputs()
    report = patch(model, **ALONE)
    monkeypatch.setattr(thresholds, "_always", False)
    assert calls(report, x)[1:] == (1, {BY_SIZE: 1})
    monkeypatch.undo()
    expected = copy.deepcopy(unpatched(model)).double()(x.double())
    assert torch.equal(model.double()(x.double()), expected)
    assert not flash or calls(report, x.double()) == (0, 1, {FLOAT64: 1})


def unpatched(model):
    new = copy.deepcopy(model)
    unpatch(new)
    return new


def test_what_its_names_refer_to_now_is_called(monkeypatch):
    models = NanoGPT(), cases.Function(), cases.Vit(False)
    for model in models:
        patch(model, **ALONE)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *args, **kwargs: q * 0 + 7)
    monkeypatch.setattr(cases, "attention", lambda q, k, v, mask=None: q * 0 + 8)
    monkeypatch.setattr(cases, "add_mask", lambda scores, mask: scores * 0)
    numbers = (7, 8)
    for model, number in zip(models, numbers, strict=False):
        torch.testing.assert_close(
            model(inputs()), model.out(torch.full((2, LENGTH, N), number * 1.0))
        )
    v = torch.stack([*models[2].operands(x := inputs())])[2].mean(-2, keepdim=True)
    mean = v.expand(-1, -1, LENGTH, -1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(models[2](x), models[2].out(mean))


def double(t):
    t.mul_(2)


class ChangedUnseen(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        q = q * 1
        scores = q @ k.mT
        double(q)
        return scores.softmax(-1) @ v


def test_a_tensor_that_changed_unseen_raises():
    model, x = ChangedUnseen(), inputs()
    with torch.no_grad():
        expected = model(x)
        patch(model, **ALONE)
        with pytest.raises(RuntimeError, match="changed in place"):
            model(x)
        unpatch(model)
        assert torch.equal(model(x), expected)


class Ungrouped(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        return (q @ k[:, :2].mT).softmax(-1) @ v[:, :2]


def test_heads_that_do_not_broadcast_raise_as_in_the_lines():
    model, x = Ungrouped(), inputs()
    patch(model, **ALONE)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(x)


def test_lines_that_were_read_wrongly_are_given_up_in_the_first_call(monkeypatch):
    from fusedops.patching.lines.attention import steps, trial

    monkeypatch.setattr(trial, "_tried", type(trial._tried)())
    scaled = steps.STEPS["*"]

    def wrongly(*args):
        after = scaled(*args)
        return dataclasses.replace(after, scale=after.scale * 1.1)

    monkeypatch.setitem(steps.STEPS, "*", wrongly)
    model, x = Lines(), inputs()
    expected = model(x)
    report = patch(model, **ALONE)
    assert report.counts((x,)).reasons.keys() == {"a trial run differed"}
    monkeypatch.undo()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


# Instances


def test_other_instances_copies_and_pickles():
    model, other, x = NanoGPT(False).eval(), NanoGPT(False).eval(), inputs()
    expected = other(x)
    report = patch(model, **ALONE)
    assert type(other) is NanoGPT and torch.equal(other(x), expected)
    new = copy.deepcopy(model)
    assert torch.equal(new(x), model(x)) and type(new) is type(model)
    assert type(pickle.loads(pickle.dumps(model))) is NanoGPT
    assert not look_again(model, report) and len(attention_rows(report.fused)) == 2
    unpatch(model)
    assert look_again(model, report) and not report.fused


def test_patched_again_with_less_and_more():
    model, x = nn.Sequential(cases.LitGPT(), nn.LayerNorm(N)), inputs()
    expected = model(x)
    with patched(model, attention=False) as report:
        assert not attention_rows([*report.fused, *report.kept])
        with patched(model) as report:
            assert calls(report, x)[1] == 0
        assert type(model[0]) is cases.LitGPT
    assert torch.equal(model(x), expected)


def test_transforms_and_traces_see_the_lines():
    model, x = FUSED["nanoGPT by hand"]().eval(), inputs()
    patch(model, **ALONE)
    expected = model(x)
    torch.testing.assert_close(torch.func.vmap(model)(x[None])[0], expected)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)


@grid(name=["einsum", "function", "static method", "litgpt", "ViT by hand", "softcap"])
def test_one_graph(name):
    model, x = FUSED[name]().eval(), inputs()
    patch(model, **ALONE)
    expected = model(x)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected
    )
    torch._dynamo.reset()
