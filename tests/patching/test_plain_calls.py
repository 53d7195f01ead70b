"""Each call in a model's own code that patch leaves to torch has a row."""

import gc
import math
import sys
from contextlib import nullcontext

import pytest
import torch
from axes import grid
from torch import nn
from torch.nn import functional as F

from fusedops import patch
from fusedops.functional import layer_norm
from patching.test_counts import llama

N = 64


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Attention(nn.Module):
    """As in nanoGPT: torch's function, or the products and the softmax written out."""

    def __init__(self, flash):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(N, 3 * N), nn.Linear(N, N), nn.Dropout(0.0)
        self.flash = flash

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            weights = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            weights = F.softmax(weights, dim=-1)
            weights = self.dropout(weights)
            y = weights @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Mlps(nn.Module):
    """Other people's forms of MLPs. Some forms are fused."""

    def __init__(self):
        super().__init__()
        self.fc, self.up, self.down = nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N)
        self.act, self.mix = nn.GELU(), nn.Conv1d(N, N, 1)
        self.ffn = nn.Sequential(nn.LayerNorm(N), NewGELU(), nn.Linear(N, N))

    def through_a_method(self, x):
        return self.down(self.act(self.fc(x)))

    def forward(self, x):
        gate = F.gelu(self.fc(x), approximate="tanh")
        written = 0.5 * x * (1 + torch.erf(x / math.sqrt(2.0)))
        gated = F.gelu(self.fc(x), approximate="tanh") * self.up(x)
        mixed = F.gelu(self.mix(x.transpose(1, 2)))  # a convolution has no kernel here
        return self.through_a_method(x) + self.ffn(x) + gate + written + gated + mixed.mT


class Model(nn.Module):
    def __init__(self, flash=True):
        super().__init__()
        self.table, self.attention, self.mlps = nn.Embedding(9, N), Attention(flash), Mlps()
        self.head = nn.Linear(N, 9)

    def forward(self, ids, targets=None):
        logits = self.head(self.mlps(self.attention(self.table(ids))))
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


IDS = torch.arange(8).view(2, 4)
ROWS = {
    ("", "loss", "F.cross_entropy"),
    ("mlps", "activation", "GELU written out"),
    ("mlps.ffn.1", "activation", "NewGELU"),
}


def rows(report):
    return {(s.path, s.kind, s.was.partition(",")[0]) for s in report.kept if s.kind != "linear"}


def test_every_call_has_a_row_with_its_line():
    report = patch(Model())
    assert rows(report) == ROWS and len(report.kept) == len(ROWS) + len(kept_linears(report))
    sites = {site.was for site in report.fused if site.kind == "attention"}
    assert sites == {
        f"F.scaled_dot_product_attention, test_plain_calls.py:{line_of('scaled_dot_product')}",
        f"softmax attention written out, test_plain_calls.py:{line_of('softmax')}",
    }
    assert report.coverage["attention"] == (2, 2)
    assert "loss: 0 of 1 fused (1 kept: its logits are smaller than the head's" in report.summary


def kept_linears(report):
    return [site for site in report.kept if site.kind == "linear"]


def line_of(text):
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if f"F.{text}" in line)


@grid("name", ["attention", "loss", "mlp", "linear"])
def test_an_argument_that_is_off_has_no_rows(name):
    kinds = {name} | ({"activation"} if name == "linear" else set())
    assert rows(patch(Model(), **{name: False})) == {row for row in ROWS if row[1] not in kinds}


@grid("flash", [True, False])
def test_counts_marks_the_branch_that_never_runs(flash):
    model = Model(flash)
    report = patch(model)
    assert "not reached" not in str(report)
    report.counts((IDS,))
    other = "softmax attention written out" if flash else "F.scaled_dot_product_attention"
    assert uncalled(report.kept) == {"F.cross_entropy"} and uncalled(report.fused) == {other}
    assert "attention: 2 of 2 fused (1 not called)" in report.summary
    report.counts((IDS, IDS))
    assert not uncalled(report.kept) and uncalled(report.fused) == {other}


def uncalled(sites):
    return {site.was.partition(",")[0] for site in sites if site.uncalled}


def test_a_fused_site_of_a_dead_branch_is_marked():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(N), nn.LayerNorm(N)

        def forward(self, x, twice=False):
            return self.second(self.first(x)) if twice else self.first(x)

    model = Branches()
    report = patch(model)
    report.counts((torch.randn(2, N),))
    assert [(site.path, site.uncalled) for site in report.fused] == [
        ("first", False),
        ("second", True),
    ]
    assert "not called by the batch of counts" in str(report)


def test_kept_rows_are_no_failure_of_strict_and_the_model_computes_the_same():
    torch.manual_seed(0)
    model = Model()
    before = model(IDS, IDS)
    patch(model, strict=True)
    torch.testing.assert_close(model(IDS, IDS), before)


def test_a_call_on_a_line_that_runs_without_it_is_marked():
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.off = nn.LayerNorm(N), nn.Parameter(torch.zeros(()))

        def forward(self, x, gelu=False):
            return F.gelu(self.norm(x) + self.off) if gelu else torch.tanh(self.norm(x))

    model = Choice()
    report = patch(model)
    for gelu in (False, True):
        report.counts({"x": torch.randn(2, N), "gelu": gelu})
        assert [site.uncalled for site in report.kept] == [not gelu]


def test_the_loss_around_a_model_of_transformers_has_its_own_row():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()[0]

        def forward(self, input_ids):
            logits = self.inner(input_ids=input_ids).logits
            return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten())

    report = patch(Wrapper())
    assert [site.path for site in report.fused if site.kind == "loss"] == ["inner.lm_head"]
    assert [site.path for site in report.kept if site.kind == "loss"] == [""]


def test_code_that_cannot_be_read_has_a_note():
    scope = {"nn": nn, "F": F}
    exec("class Made(nn.Linear):\n    def forward(self, x):\n        return F.gelu(x)", scope)
    report = patch(nn.Sequential(scope["Made"](N, N), nn.LayerNorm(N)))
    assert "Made: not searched for calls that stay with torch: the source" in str(report)


def test_many_reports_and_counts_leave_nothing_behind():
    def once(width):
        model = nn.Sequential(nn.Linear(N, N), NewGELU(), Attention(flash=True))
        report = patch(model)
        with nullcontext() if width == N else pytest.raises(RuntimeError, match="shapes"):
            report.counts((torch.randn(1, 2, width),))
        assert sys.getprofile() is None

    for i in range(20):
        once(N - (i % 3 == 0))
    before = tensors()
    for i in range(300):
        once(N - (i % 3 == 0))
    assert tensors() <= before  # less where garbage of earlier tests went too


def tensors():
    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


class ScaleShift(nn.Module):
    """As in LLMs-from-scratch; `swapped` names the parameters the other way round."""

    def __init__(self, swapped):
        super().__init__()
        self.eps, self.swapped = 1e-5, swapped
        self.scale, self.shift = nn.Parameter(torch.randn(N)), nn.Parameter(torch.randn(N))

    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        scale, shift = (self.shift, self.scale) if self.swapped else (self.scale, self.shift)
        return scale * ((x - mean) / torch.sqrt(var + self.eps)) + shift


@grid("swapped", [False, True])
def test_a_trial_run_tells_scale_from_shift(swapped):
    model = nn.Sequential(ScaleShift(swapped))
    x = torch.randn(3, N)
    expected = model(x)
    assert [site.now for site in patch(model).fused] == ["layer_norm"]
    torch.testing.assert_close(model(x), expected)
    scale, shift = model[0].scale, model[0].shift
    weight, bias = (shift, scale) if swapped else (scale, shift)
    assert torch.equal(model(x), layer_norm(x, (N,), weight, bias, 1e-5))
