"""patch rewrites layers that normalize a sum; results equal the original's."""

import copy
import functools
from unittest import mock

import pytest
import torch
from axes import grid
from torch import nn

from fusedops.patching import patch, unpatch
from fusedops.patching.lines.residual import site as residual
from patching.lines.residual_cases import (
    FUSED,
    LEFT,
    AcrossIf,
    EarlyReturn,
    InLoop,
    Layer,
    N,
    PostNorm,
    PreNorm,
    build,
    close,
    residual_sites,
)


def gradients(model, x, *args):
    y = model[0](x, *args)
    torch.manual_seed(1)
    cotangent = torch.randn(y.shape).to(y)
    return y, torch.autograd.grad(y, [x, *model.parameters()], cotangent, allow_unused=True)


@grid(kind=FUSED, dtype=[torch.float32, torch.bfloat16])
def test_fused(kind, dtype):
    model = build(kind).to(dtype).eval()
    x = torch.randn(2, 5, N).to(dtype).requires_grad_()
    calls = [(x,), (x, torch.randn_like(x))] if kind is AcrossIf else [(x,)]
    calls += [(x, True)] if kind is EarlyReturn else []
    expected = [gradients(model, *call) for call in calls]
    report = patch(model)
    normed = [s.path for s in residual_sites(report.fused) if s.path != "0"]
    assert normed == [f"0.{n}" for n in FUSED[kind]]
    assert not residual_sites(report.skipped)
    for call, (y, grads) in zip(calls, expected, strict=True):
        ours, our_grads = gradients(model, *call)
        assert ours.dtype == dtype
        close([ours, *our_grads], [y, *grads], dtype)
    unpatch(model)
    assert all(torch.equal(model[0](*c), y) for c, (y, _) in zip(calls, expected, strict=True))
    assert type(model[0]) is kind


@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)
def test_fused_sums_are_what_runs(kind, sums):
    model = build(kind).eval()
    model[0].flag = False
    patch(model)
    model(torch.randn(2, 5, N))
    expected = {AcrossIf: 1, InLoop: 3}.get(kind, len(FUSED[kind]))
    assert sums.call_count == expected


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_left_with_a_reason(kind):
    model = build(kind).eval()
    x = torch.randn(2, 5, N)
    expected = model(x)
    report = patch(model)
    (site,) = residual_sites(report.skipped)
    assert LEFT[kind] in site.reason
    assert type(model[0]) is kind
    close([model(x)], [expected])


def test_notes_claim_what_is_true():
    class NoSum(Layer):
        def forward(self, hidden):
            return self.norm(self.mix(hidden))

    notes = patch(nn.Sequential(NoSum(), nn.LayerNorm(N))).notes
    assert "residual: NoSum.forward has a norm, but no residual sum of its own" in notes
    assert not any("Sequential" in note for note in notes)


def test_the_sum_keeps_its_strides(sums):
    """A view after it may depend on them, also where the norm's own output is contiguous."""

    class Viewed(Layer):
        def forward(self, hidden):
            hidden = hidden + hidden.clone()
            normed = self.norm(hidden)
            return normed, hidden.transpose(0, 1).view(-1)

    model = build(Viewed).eval()
    x = torch.randn(3, 5, N).transpose(0, 1)
    expected = model(x)
    patch(model)
    close(model(x), expected)
    assert sums.call_count == 0


def test_a_sum_with_a_dropout_keeps_its_order():
    """If the terms' strides differ, the first term's are used."""

    class Ordered(Layer):
        def forward(self, hidden):
            mixed = self.dropout(self.mix(hidden.contiguous()))
            total = hidden + mixed
            return self.norm(total), total

    model = build(Ordered).eval()
    x = torch.randn(3, 5, N).transpose(0, 1)
    (_, expected) = model(x)
    patch(model)
    assert model(x)[1].stride() == expected.stride()


def test_a_sum_before_a_norm_that_is_parametrized():
    model = build(PostNorm)
    nn.utils.parametrize.register_parametrization(model[0].norm, "weight", nn.Identity())
    report = patch(model)
    skipped = {(s.path, s.kind): s.reason for s in report.skipped}
    assert skipped["0.norm", "norm"] == "it is parametrized"
    assert "is not fused" in skipped["0.norm", "residual"]


@pytest.mark.parametrize(
    "disturb",
    {
        "forward hook": lambda norm: norm.register_forward_hook(lambda *_: None),
        "pre hook": lambda norm: norm.register_forward_pre_hook(lambda *_: None),
        "backward hook": lambda norm: norm.register_full_backward_hook(lambda *_: None),
        "own forward": lambda norm: setattr(norm, "forward", functools.partial(norm.forward)),
        "global hook": lambda norm: nn.modules.module.register_module_forward_hook(lambda *_: None),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_norm_that_someone_watches_is_called(disturb):
    """Hooks may come after patch, so every call checks for them."""
    model = build(PostNorm).eval()
    x = torch.randn(2, N)
    patch(model)
    expected, norm = model(x), model[0].norm
    handle = disturb[1](norm)
    with mock.patch.object(residual, "_fused_sum", side_effect=residual._fused_sum) as counted:
        close([model(x)], [expected])
        watched_everywhere = disturb[0] == "global hook"
        assert counted.call_count == (0 if watched_everywhere else 1)
    if handle is not None:
        handle.remove()


def test_what_the_fused_sum_cannot_do_runs_as_written(sums):
    """For example broadcasting, two dtypes, a number."""
    model = build(PostNorm).eval()
    norm, x = model[0].norm, torch.randn(3, 4, N)
    others = [torch.randn(1, 4, N), x.half(), 1.0]
    expected = [norm(x + other) for other in others]
    patch(model)
    for other, y in zip(others, expected, strict=True):
        close(residual.add_norm(norm, x, other), [y, x + other])
        close(residual.add_norm(norm, other, x), [y, other + x])
    assert sums.call_count == 0


class Rms(nn.Module):
    """Llama's."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(N)), 1e-6

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(N), Rms], ids=["layer", "rms"])
@pytest.mark.parametrize("kind", [PostNorm, PreNorm], ids=lambda kind: kind.__name__)
def test_autocast_adds_bfloat16_to_a_float32_stream(norm, kind, sums):
    model = build(kind).eval()
    model[0].norm, model[0].after = norm(), norm()
    x = torch.randn(2, 5, N, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, grads = gradients(model, x)
        patch(model)
        got, our_grads = gradients(model, x)
    assert got.dtype == expected.dtype
    assert [g.dtype for g in our_grads if g is not None] == [
        g.dtype for g in grads if g is not None
    ]
    close([got, *our_grads], [expected, *grads], torch.bfloat16)
    assert sums.call_count == len(FUSED[kind])
    assert all(call.args[1].dtype != call.args[2].dtype for call in sums.call_args_list)


def test_norm_replaced_after_patch(sums):
    model = build(PostNorm).eval()
    patch(model)
    model[0].norm = nn.Identity()
    x = torch.randn(2, N)
    close([model(x)], [PostNorm.forward(model[0], x)])
    assert sums.call_count == 1


def test_without_norm_a_sum_has_nothing_to_go_into():
    sites = residual_sites(patch(build(PostNorm), norm=False).skipped)
    assert all("(LayerNorm) is not fused" in site.reason for site in sites)


def test_deepcopy_stays_patched_and_unpatches(sums):
    model = build(PostNorm).eval()
    patch(model)
    other = copy.deepcopy(model)
    other(torch.randn(2, N))
    assert sums.call_count == 2
    unpatch(other)
    assert type(other[0]) is PostNorm
    assert type(model[0]) is not PostNorm
