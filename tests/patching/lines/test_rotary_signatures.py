"""patch fuses rotary functions of one tensor, and with other tables."""

import copy
import sys

import pytest
import torch
from axes import grid
from torch import nn

from fusedops.patching import patch, unpatch
from fusedops.patching.lines.rotary import site as rotary
from fusedops.patching.lines.rotary.branches import BRANCHES
from fusedops.patching.lines.rotary.trial import OTHER, UNKNOWN
from fusedops.testing import yardstick
from patching.lines.rotary_functions import (
    rope_in_a_loop,
    rope_of_a_long_table,
    rope_of_a_renamed_option,
    rope_of_few,
    rope_of_few_rows,
    rope_of_numbers,
    rope_reordered,
    rope_scaled,
    rope_with_checks,
    rot_embed,
    rot_embed_of_sides,
    rotary_anywhere,
    rotary_backwards,
    rotary_of_complex,
    rotary_of_pairs,
    rotary_of_positions,
    rotary_sin_first,
)
from patching.quiet import quietly
from patching.same import results

HEADS, WIDTH = 3, 8


def table(shape, dtype):
    torch.manual_seed(1)
    return [torch.randn(shape).to(dtype) for _ in range(2)]


def of_width(*places):
    return lambda dtype: table((*places, WIDTH), dtype)


# function, its tables for [2, 5] tokens, and where the heads are
FORMS = {
    "checks": (rope_with_checks, of_width(2, 5), 1),
    "checks, one row": (rope_with_checks, of_width(1, 5), 1),
    "long": (rope_of_a_long_table, of_width(9), 1),
    "backwards": (rotary_backwards, lambda dtype: table((1, 5, 1, WIDTH // 2), dtype), 2),
    "anywhere 2": (rotary_anywhere, of_width(5), 1),
    "anywhere 4": (rotary_anywhere, of_width(1, 1, 5), 1),
    "anywhere last": (rotary_anywhere, of_width(2, 5, 1), 2),
    "sin first": (rot_embed, of_width(5), 1),
    "half": (rot_embed, of_width(5), 1),
    "sides": (rot_embed_of_sides, lambda dtype: [torch.cat(of_width(5)(dtype), -1)], 1),
    "pairs": (
        rotary_of_pairs,
        lambda dtype: [torch.stack(table((5, WIDTH // 2), dtype), -1)],
        2,
    ),
    "complex": (
        rotary_of_complex,
        lambda dtype: [torch.complex(*table((5, WIDTH // 2), torch.float32))],
        2,
    ),
    "q, k, sin, cos": (rotary_sin_first, of_width(2, 5), 1),
}


REFUSED = {
    rope_scaled: UNKNOWN,
    rope_reordered: UNKNOWN,
    rotary_of_positions: OTHER,
    **dict.fromkeys(
        [rope_of_few, rope_of_few_rows, rope_of_numbers, rope_in_a_loop, rope_of_a_renamed_option],
        BRANCHES,
    ),
}


rotary_now = rotary_anywhere  # what the models below call


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(WIDTH * HEADS, WIDTH * HEADS) for _ in range(2))

    def heads(self, x):
        q, k = (proj(x).unflatten(-1, (HEADS, WIDTH)) for proj in (self.q_proj, self.k_proj))
        return q, k


class One(Attention):
    """A call for each tensor, in one statement or in two."""

    def forward(self, x, first, second=None):
        q, k = (t.transpose(1, 2) for t in self.heads(x))
        q, k = rotary_now(q, first, second), rotary_now(k, first, second)
        return q @ k.transpose(2, 3)


class OneLast(Attention):
    def forward(self, x, first, second=None):
        q, k = self.heads(x)
        q = rotary_now(q, first, second)
        k = rotary_now(k, first, second)
        return q @ k.transpose(2, 3)


class OneTable(Attention):
    def forward(self, x, first, second=None):
        q, k = (t.transpose(1, 2) for t in self.heads(x))
        q = rotary_now(q, first)
        k = rotary_now(k, first)
        return q @ k.transpose(2, 3)


class OneTableLast(Attention):
    def forward(self, x, first, second=None):
        q, k = self.heads(x)
        q, k = rotary_now(q, first), rotary_now(k, first)
        return q @ k.transpose(2, 3)


class Half(Attention):
    def __init__(self):
        super().__init__()
        self.half = True

    def forward(self, x, first, second=None):
        q, k = (t.transpose(1, 2) for t in self.heads(x))
        q = torch.cat([q[:, :, :0], rotary_now(q, first, second, half=self.half)], 2)
        k = torch.cat([k[:, :, :0], rotary_now(k, first, second, half=self.half)], 2)
        return q @ k.transpose(2, 3)


class Both(Attention):
    def forward(self, x, first, second=None):
        q, k = (t.transpose(1, 2) for t in self.heads(x))
        q, k = rotary_now(q, k, first, second)
        return q @ k.transpose(2, 3)


class BothNamed(Attention):
    def forward(self, x, first, second=None):
        q, k = self.heads(x)
        q, k = rotary_now(q, k, freqs_cis=first)
        return q @ k.transpose(2, 3)


MODELS = {
    "half": Half,
    "sides": OneTable,
    "pairs": OneTableLast,
    "complex": BothNamed,
    "q, k, sin, cos": Both,
}


def build(name="anywhere 2"):
    torch.manual_seed(0)
    cls = MODELS.get(name) or (One, OneLast)[FORMS[name][2] - 1]
    return nn.Sequential(cls())[0]


def inputs(name, dtype=torch.float32, tables=None):
    torch.manual_seed(2)
    return [torch.randn(2, 5, WIDTH * HEADS).to(dtype), *FORMS[name][1](tables or dtype)]


def wide(t):
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


@pytest.fixture(autouse=True)
def no_function_is_known(monkeypatch):
    for name in ("_rotations", "_probed"):
        monkeypatch.setattr(rotary, name, type(getattr(rotary, name))())


def use(monkeypatch, function):
    monkeypatch.setattr(sys.modules[__name__], "rotary_now", function)


@pytest.fixture
def calls(recorded):
    """Returns the dtypes of q in calls of the fused function, once it is used in earnest."""
    return recorded(rotary, "rotary_embedding", lambda q, *_, **options: q.dtype)


def patched_sites(model):
    report = quietly(patch, model, linear=False)
    return [site for site in [*report.fused, *report.skipped] if site.kind == "rotary"]


@grid(
    name=FORMS,
    dtype=[torch.float32, torch.bfloat16],
    tables=[torch.float32, torch.bfloat16],
)
def test_fused(name, dtype, tables, monkeypatch, calls):
    use(monkeypatch, FORMS[name][0])
    model, args = build(name).to(dtype), inputs(name, dtype, tables)
    try:
        before = results(model, *args)
    except RuntimeError:  # the function gives other dtypes to the product
        pytest.skip("the model does not run in these dtypes")
    exact = results(copy.deepcopy(model).double(), *map(wide, args))
    sites = patched_sites(model)
    assert sites and all(site.now.startswith("rotary_embedding") for site in sites)
    del calls[:]
    after = results(model, *args)
    assert calls == [dtype] * (1 if name in ("complex", "q, k, sin, cos") else 2)
    for got, eager, true in zip(after, before, exact, strict=True):
        assert got.dtype == eager.dtype and yardstick(got, eager, true) is None
    unpatch(model)
    assert all(map(torch.equal, results(model, *args), before))


@pytest.mark.parametrize("function", REFUSED)
def test_left_with_the_reason(function, monkeypatch):
    use(monkeypatch, function)
    model = build("sides" if function is rotary_of_positions else "anywhere 2")
    assert {(site.now, site.reason) for site in patched_sites(model)} == {("", REFUSED[function])}


def test_an_option_that_changes_after_patch(monkeypatch, calls):
    use(monkeypatch, rot_embed)
    model, args = build("half"), inputs("half")
    patched_sites(model)
    for half in (False, True):
        model.half = half
        torch.testing.assert_close(model(*args), Half.forward(copy.deepcopy(model), *args))
    model.half = 1  # was not run, and is true
    del calls[:]
    assert torch.equal(model(*args), Half.forward(model, *args)) and not calls


ODD = {
    "another rank of x": lambda x, cos, sin: (x[0], cos[0], sin[0]),
    "a table of one row": lambda x, cos, sin: (x, cos[:, :1], sin[:, :1]),
    "a long table": lambda x, cos, sin: (x, cos.repeat(1, 2, 1), sin.repeat(1, 2, 1)),
    "a gradient of cos": lambda x, cos, sin: (x, cos.clone().requires_grad_(), sin),
    "unlike tables": lambda x, cos, sin: (x, cos, sin[:1]),
    "numbers": lambda x, cos, sin: (x, 0.5, 0.25),
}


@grid(odd=ODD, function=[rope_with_checks, rotary_anywhere])
def test_calls_that_run_the_function(odd, function, monkeypatch, calls):
    use(monkeypatch, function)
    model, args = build(), ODD[odd](*inputs("checks"))
    try:
        expected = model(*args)
    except Exception as error:  # noqa: BLE001  whatever it raises
        patched_sites(model)
        del calls[:]
        with pytest.raises(type(error)):
            model(*args)
    else:
        patched_sites(model)
        del calls[:]
        assert torch.equal(model(*args), expected)
    assert not calls


def test_generation_and_training_shapes(monkeypatch, calls):
    """One token with a row of the table, and other batches than the runs had."""
    use(monkeypatch, rope_with_checks)
    model = build("checks")
    patched_sites(model)
    for batch, length in ((1, 1), (3, 1), (4, 11), (3, 3)):
        args = torch.randn(batch, length, WIDTH * HEADS), *of_width(1, length)(torch.float32)
        del calls[:]
        torch.testing.assert_close(model(*args), One.forward(copy.deepcopy(model), *args))
        assert calls


def test_compile(monkeypatch):
    use(monkeypatch, rope_with_checks)
    model, args = build("checks"), inputs("checks")
    expected = model(*args)
    patched_sites(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), expected)
    torch._dynamo.reset()


def test_the_report_counts_the_calls(monkeypatch):
    use(monkeypatch, rope_with_checks)
    model, args = build("checks"), inputs("checks")
    report = quietly(patch, model, linear=False)
    counts = report.counts(tuple(args))
    rotations = [site for site in counts.sites if site.kind == "rotary"]
    assert sum(site.kernel for site in rotations) == 2
    assert not any(site.fallback for site in rotations)
