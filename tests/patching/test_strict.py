"""patch skips norms and sums that only look fusable: other gradients, edited code, side effects."""

import importlib.util
import linecache

import pytest
import torch
from calling import Calls
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fusedops.patching import patch, unpatch
from patching.modules.test_norm import LlamaLike

N = 48


def rms(x, eps):
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


class NoGradientOfRstd(LlamaLike):
    def forward(self, x):
        with torch.no_grad():
            r = rms(x, self.variance_epsilon)
        return self.weight * (x.float() * r).to(x.dtype)


class NoGradientOfWeight(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.detach(), self.bias, self.eps)


class NoGradient(LlamaLike):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class AsksForGradMode(LlamaLike):
    def forward(self, x):
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


class Clamped(LlamaLike):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class WithoutNaN(LlamaLike):
    def forward(self, x):
        return super().forward(torch.nan_to_num(x, nan=0.0))


class ReadsTensor(LlamaLike):
    def __init__(self):
        super().__init__(N)
        self.scale = torch.ones(())

    def forward(self, x):
        return super().forward(x) * self.scale


LEFT = {
    NoGradientOfRstd: "gradients",
    NoGradient: "gradients",
    AsksForGradMode: "gradients",
    Clamped: "large, infinite or NaN",
    WithoutNaN: "large, infinite or NaN",
    ReadsTensor: "reads self.scale",
}


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_norms_that_are_left(kind):
    model = nn.Sequential(kind(), nn.LayerNorm(N))
    (site,) = patch(model).skipped
    assert LEFT[kind] in site.reason
    assert type(model[0]) is kind


def test_a_weight_without_gradient_is_left():
    model = nn.Sequential(NoGradientOfWeight(N), nn.LayerNorm(N))
    (site,) = patch(model).skipped
    assert "gradients" in site.reason


def test_a_norm_is_probed_where_gradients_are_off():
    class New(LlamaLike):
        pass

    with torch.inference_mode():
        assert patch(nn.Sequential(New())).coverage == {"norm": (1, 1)}


def test_a_class_forward_that_was_replaced():
    class Own(LlamaLike):
        pass

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.LayerNorm(N), nn.SiLU()

        def forward(self, x):
            return self.norm(self.act(x) + x)

    def other(self, x):
        return self.norm(self.act(x) + 2 * x)

    x = torch.randn(4, N)
    for kind, forward in (Layer, other), (Own, lambda self, x: 3 * self.weight * x):
        old = nn.Sequential(kind())
        patch(old)
        unpatch(old)
        kind.forward = forward
        model = nn.Sequential(kind(), nn.LayerNorm(N))
        expected = model(x)
        patch(model)
        torch.testing.assert_close(model(x), expected)


class Scaled(LlamaLike):
    scale = 1.0

    def forward(self, x):
        return self.scaled(super().forward(x))

    def scaled(self, y):
        return y if self.scale == 1.0 else y * self.scale


def changes():
    def bias(norm):
        norm.bias = nn.Parameter(torch.ones(N))

    def scale(norm):
        norm.scale = 3.0

    def no_weight(norm):
        norm.weight = None

    return [
        (lambda: nn.LayerNorm(N, bias=False), bias),
        (lambda: nn.LayerNorm(N), no_weight),
        (Scaled, scale),
    ]


@pytest.mark.parametrize(("build", "change"), changes())
def test_attributes_are_read_when_it_runs(build, change):
    model = nn.Sequential(build())
    x = torch.randn(4, N)
    assert patch(model).coverage == {"norm": (1, 1)}
    change(model[0])
    got = model(x)
    unpatch(model)
    assert torch.equal(got, model(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(N), nn.LayerNorm(N, elementwise_affine=False)
        self.act = nn.ReLU(inplace=True)
        nn.init.normal_(self.norm.weight)


class Recast(Layer):
    def forward(self, x):
        h = x + x
        self.norm.to(torch.float64)
        return self.norm(h)


class GradMode(Layer):
    def forward(self, x):
        h = x + x
        previous = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        y = self.norm(h)
        torch.set_grad_enabled(previous)
        return y


class Swapped(Layer):
    def forward(self, x):
        h = x + x
        self.swap()
        return self.norm(h)

    def swap(self):
        self.norm, self.other = self.other, self.norm


class InSameStatement(Layer):
    def forward(self, x):
        h = x + x
        return self.act(h) * self.norm(h)


BETWEEN = {
    Recast: "may change the sum",
    GradMode: "may change the sum",
    Swapped: "may change the sum",
    InSameStatement: "is used between",
}


@pytest.mark.parametrize("kind", BETWEEN, ids=lambda kind: kind.__name__)
def test_a_norm_moves_past_nothing_that_may_change_it(kind):
    model = nn.Sequential(kind())
    (site,) = [s for s in patch(model).skipped if s.kind == "residual"]
    assert BETWEEN[kind] in site.reason
    assert type(model[0]) is kind


def test_a_norm_is_looked_up_after_the_terms_of_the_sum():
    class InTerm(Swapped):
        def forward(self, x):
            h = x + self.mix(x)
            return self.norm(h)

        def mix(self, x):
            self.swap()
            return x

    model = nn.Sequential(InTerm())
    x = torch.randn(4, N)
    expected = model(x)
    model[0].swap()
    report = patch(model)
    assert report.coverage["residual"] == (1, 1)
    torch.testing.assert_close(model(x), expected)


FILE = """from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, x, c):
        h = x + c
        h = h - c
        h = h + c
        return self.norm(h)
"""


@pytest.mark.parametrize("edited", [False, True])
def test_a_file_that_was_edited_since(edited, tmp_path):
    path = tmp_path / "layer_in_file.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("layer_in_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = nn.Sequential(module.Layer())
    if edited:
        path.write_text(FILE.replace("h - c", "h * c"))
        linecache.clearcache()
    report = patch(model)
    assert report.coverage.get("residual", (0, 0))[0] == (not edited)
    if edited:
        assert any("differs from the code that runs" in site.reason for site in report.skipped)


def test_verify_gives_every_run_its_own_cache():
    class Appends(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(N)

        def forward(self, x, cache):
            cache.append(1)
            return self.norm(x) * len(cache)

    cache: list = []
    patch(Appends(), verify={"x": torch.randn(4, N), "cache": cache})
    assert not cache


def test_verify_of_a_model_without_floating_point_results():
    norm = nn.LayerNorm(N)
    with pytest.raises(ValueError, match="floating-point results"):
        patch(Calls(lambda x: norm(x).argmax(-1), norm=norm), verify=torch.randn(4, N))


def in_fake_mode(run):
    with FakeTensorMode():
        run()


TRANSFORMS = {
    "fake": in_fake_mode,
    "vmap": lambda run: torch.vmap(lambda x: (run(), x)[1])(torch.ones(3)),
    "grad": lambda run: torch.func.grad(lambda x: (run(), x)[1])(torch.ones(())),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_patch_under_a_mode_or_a_transform(transform):
    class New(LlamaLike):
        pass

    reports = []
    TRANSFORMS[transform](lambda: reports.append(patch(nn.Sequential(New()))))
    assert reports[0].coverage == {"norm": (1, 1)}
    model = nn.Sequential(New())
    x = torch.randn(4, N)
    expected = model(x)
    patch(model)
    torch.testing.assert_close(model(x), expected)
