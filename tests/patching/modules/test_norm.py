"""patch recognises norms, and runs the fused or the original forward."""

import copy
import dataclasses

import pytest
import torch
from axes import grid
from torch import nn
from torch.nn import functional as F

from fusedops.patching import patch, unpatch
from fusedops.patching.modules.norm.samples import same

N = 48


class LlamaLike(nn.Module):
    """An RMSNorm that rounds before it multiplies."""

    def __init__(self, n=N, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class TorchLike(LlamaLike):
    """An RMSNorm that rounds last."""

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (n * self.weight).to(x.dtype)


class GemmaLike(LlamaLike):
    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (n * (1.0 + self.weight.float())).type_as(x)


class Weightless(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-5

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return n.to(x.dtype)


class ByHand(nn.LayerNorm):
    """LayerNorm written out, with other names and eps as a constant."""

    def __init__(self, n):
        nn.Module.__init__(self)
        self.gamma, self.beta = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        d = x.float() - x.float().mean(-1, keepdim=True)
        n = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 1e-12)
        return (n * self.gamma + self.beta).to(x.dtype)


class EpsOutside(LlamaLike):
    def forward(self, x):
        rms = x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        return self.weight * (x.float() / rms).to(x.dtype)


class Sloppy(LlamaLike):
    """Right in float32, but in bfloat16 it rounds at every step."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(LlamaLike):
    def forward(self, x, gate=None):
        x = x if gate is None else x * F.silu(gate)
        return super().forward(x)


class ScaleNorm(nn.Module):
    """One number for a weight: of a single feature it is an rms_norm."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(1)), 1e-6

    def forward(self, x):
        return x / (x.float().norm(dim=-1, keepdim=True) + self.eps) * self.weight


class OverChannels(nn.Module):
    """A norm of one group of channels: with 3-D inputs, it norms all but the first dimension."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(N)) for _ in range(2))
        self.eps = 1e-5

    def forward(self, x):
        return nn.functional.group_norm(x, 1, self.weight, self.bias, self.eps)


class Buffered(nn.LayerNorm):
    def __init__(self, n):
        super().__init__(n)
        self.register_buffer("calls", torch.zeros(()))


class OtherName(nn.GroupNorm):
    """A GroupNorm whose name does not tell."""


RECOGNISED = {
    "rms_norm(rounding='llama')": lambda: LlamaLike(),
    "rms_norm(rounding='torch')": lambda: TorchLike(),
    "rms_norm(rounding='torch', offset=1.0)": lambda: GemmaLike(),
    "rms_norm(rounding='llama') ": lambda: Weightless(),
    "rms_norm(rounding='torch') ": lambda: nn.RMSNorm(N),
    "layer_norm": lambda: nn.LayerNorm(N),
    "layer_norm ": lambda: ByHand(N),
    "layer_norm  ": lambda: nn.LayerNorm(N, elementwise_affine=False),
    "layer_norm   ": lambda: nn.LayerNorm((3, N), eps=1e-12),
    "layer_norm    ": lambda: nn.LayerNorm(N, bias=False),
}
LEFT = {
    "its weight may broadcast to inputs of other shapes": lambda: ScaleNorm(),
    "its output is neither layer_norm nor rms_norm of its input": lambda: EpsOutside(),
    "its forward takes x, gate, not one input": lambda: Gated(),
    "it does not normalize the last dimensions of every input": lambda: OverChannels(),
    "has buffers": lambda: Buffered(N),
}
NO_SITES = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(N),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(N),
    "GroupNorm of one group": lambda: nn.GroupNorm(1, N),
    "GroupNorm": lambda: nn.GroupNorm(2, N),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(N, affine=True),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    "a subclass": lambda: OtherName(2, N),
}


def holder(norm):
    torch.manual_seed(0)
    for p in norm.parameters():
        nn.init.normal_(p)
    return nn.Sequential(norm)


@grid(formula=RECOGNISED, dtype=[torch.float32, torch.bfloat16])
def test_recognised_and_equal(formula, dtype):
    model = holder(RECOGNISED[formula]()).to(dtype)
    x = torch.randn(7, 3, N, dtype=dtype, requires_grad=True)
    expected, cotangent = model(x), torch.randn(7, 3, N, dtype=dtype)
    gradients = torch.autograd.grad(expected, [x, *model.parameters()], cotangent)
    (site,) = patch(model).fused
    assert site.now == formula.strip()
    got = model(x)
    step = torch.finfo(dtype).eps
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=step, atol=4e-6)
    ours = torch.autograd.grad(got, [x, *model.parameters()], cotangent)
    for our_grad, their_grad in zip(ours, gradients, strict=True):
        assert (our_grad - their_grad).norm() <= 4 * step * their_grad.norm()
    unpatch(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("reason", LEFT)
def test_left_with_a_reason(reason):
    model = holder(LEFT[reason]())
    was = type(model[0])
    with pytest.warns(UserWarning, match="nothing was fused"):
        report = patch(model)
    (site,) = report.skipped
    assert reason in site.reason
    assert type(model[0]) is was


@pytest.mark.parametrize("name", NO_SITES)
def test_norms_over_other_dimensions_are_no_sites(name):
    norm = NO_SITES[name]()
    model = nn.Sequential(nn.LayerNorm(N), norm)
    report = patch(model, strict=True)
    assert [site.path for site in report.fused] == ["0"] and not report.skipped
    assert model[1] is norm and type(norm) is type(NO_SITES[name]())


@grid(
    "dtype,moved,steps,equal",
    [
        (torch.bfloat16, 20, 1, True),
        (torch.bfloat16, 30, 1, False),
        (torch.bfloat16, 1, 3, False),
        (torch.float16, 160, 1, True),
        (torch.float16, 200, 1, False),
        (torch.float32, 200_000, 1, True),
        (torch.float32, 1, 64, False),
    ],
)
def test_what_counts_as_equal(dtype, moved, steps, equal):
    """Of 200,000 results near 1, some are a few rounding steps away."""
    expected = torch.linspace(1.0, 1.5, 200_000).to(dtype)
    got = expected.clone()
    got.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[:moved] += steps
    assert same(got, expected, dtype) == equal
    assert not same(got.double(), expected, dtype)


def test_offset_and_rounding_are_told_apart():
    """A formula that is right in float32 and wrong in bfloat16 is not used in bfloat16."""
    model = holder(Sloppy())
    patch(model)
    regimes = model[0]._fusedops.regimes
    assert (torch.float32, torch.float32, False) in regimes
    assert not any(x == torch.bfloat16 for x, *_ in regimes)


def test_regimes_that_were_not_proven_run_the_original(norms):
    model = holder(Sloppy())
    unpatched = copy.deepcopy(model).bfloat16()
    patch(model)
    norms.clear()
    model(torch.randn(2, N))
    assert norms == ["rms_norm"]
    x = torch.randn(2, N, dtype=torch.bfloat16)
    assert torch.equal(model.bfloat16()(x), unpatched(x))
    assert norms == ["rms_norm"]


def test_float32_weight_beside_bfloat16_input(norms):
    model = holder(LlamaLike())
    x = torch.randn(5, N, dtype=torch.bfloat16)
    expected = model(x)
    patch(model)
    norms.clear()
    got = model(x)
    assert norms == ["rms_norm"]
    assert got.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(got, expected)


def test_float64_of_a_norm_that_casts_to_float32_stays(norms):
    model = holder(LlamaLike()).double()
    x = torch.randn(5, N, dtype=torch.float64)
    expected = model(x)
    patch(model)
    norms.clear()
    assert torch.equal(model(x), expected)
    assert norms == []


@pytest.mark.parametrize("of", [LlamaLike, lambda: nn.LayerNorm(N)], ids=["rms", "layer"])
def test_autocast_gives_what_the_module_gives(of):
    model = holder(of())
    inputs = [torch.randn(4, N), torch.randn(4, N, dtype=torch.bfloat16)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = [model(x) for x in inputs]
        patch(model)
        got = [model(x) for x in inputs]
    for our_y, their_y in zip(got, expected, strict=True):
        assert our_y.dtype == their_y.dtype
        torch.testing.assert_close(our_y, their_y)


def test_autocast_that_was_not_proven_runs_the_original(norms):
    model = holder(LlamaLike())
    patch(model)
    state = model[0]._fusedops
    proven = frozenset(regime for regime in state.regimes if not regime[2])
    model[0]._fusedops = dataclasses.replace(state, regimes=proven)
    norms.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, N))
    assert norms == []


def test_other_calls_reach_the_original(norms):
    """A keyword, a tensor subclass or a non-tensor reaches the original forward."""

    class Marked(torch.Tensor):
        pass

    model = holder(LlamaLike())
    x = torch.randn(4, N)
    expected = model(x)
    patch(model)
    norms.clear()
    assert torch.equal(model[0](hidden_states=x), expected)
    assert type(model(x.as_subclass(Marked))) is Marked
    with pytest.raises(AttributeError, match="float"):
        model([1.0])
    assert norms == []


@grid(
    "view,runs",
    [
        (lambda x: x.transpose(1, 2), ["rms_norm"]),  # a query with its heads in front
        (lambda x: x.permute(2, 0, 1, 3)[1:], ["rms_norm"]),
        (lambda x: x[..., :N:2].repeat(1, 1, 1, 2)[..., ::1], ["rms_norm"]),
        (lambda x: x[:, :, :, None, 0].expand(-1, -1, -1, N).transpose(2, 3), []),
    ],
)
def test_strides_are_what_the_module_gives(view, runs, norms):
    """An elementwise norm keeps the strides; a later view may depend on them."""
    model = holder(LlamaLike())
    x = view(torch.randn(2, 3, N, N))
    expected = model(x)
    patch(model)
    norms.clear()
    got = model(x)
    assert norms == runs
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)


def test_probe_leaves_the_random_stream_and_the_module_alone():
    model = holder(nn.LayerNorm(N))
    hook = model[0].register_forward_hook(lambda *_: pytest.fail("the probe ran a hook"))
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    patch(model)
    hook.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_meta_module():
    with torch.device("meta"):
        model = nn.Sequential(LlamaLike(), nn.LayerNorm(N))
    report = patch(model)
    assert [site.now for site in report.fused] == ["rms_norm(rounding='llama')", "layer_norm"]
    assert model[0].weight.is_meta
    model.to_empty(device="cpu")
    assert model(torch.randn(2, N)).shape == (2, N)


def test_one_module_under_two_names_is_one_site():
    norm = LlamaLike()
    model = nn.ModuleDict({"a": norm, "b": norm})
    assert [site.path for site in patch(model).fused] == ["a"]


def test_hooks_still_run():
    model = holder(LlamaLike())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    patch(model)
    model[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    model(torch.randn(2, N))
    assert seen == ["before", "forward"]


def test_eps_is_read_when_it_runs():
    model = holder(LlamaLike())
    patch(model)
    model[0].variance_epsilon = 1.0
    x = torch.randn(4, N)
    torch.testing.assert_close(model(x), LlamaLike.forward(model[0], x))


def test_parametrized_weight_and_unpatch_below_it(norms):
    """Another library's subclass on top: our forward goes on, and steps aside on unpatch."""

    class Doubled(nn.Module):
        def forward(self, w):
            return 2 * w

    model = holder(nn.LayerNorm(N))
    x = torch.randn(4, N)
    patch(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    norms.clear()
    expected = F.layer_norm(x, (N,), model[0].weight, model[0].bias)
    torch.testing.assert_close(model(x), expected)
    assert norms == ["layer_norm"]
    unpatch(model)
    norms.clear()
    assert torch.equal(model(x), expected)
    assert norms == []
    patch(model)
    model(x)
    assert norms[-1] == "layer_norm"


def test_what_has_no_eps_is_no_norm():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps, self.weight = 1.0, nn.Parameter(torch.ones(N))

        def forward(self, x):
            return x

    model = nn.Sequential(nn.LayerNorm(N), Counter(), nn.CosineSimilarity())
    assert patch(model).coverage == {"norm": (1, 1)}


def test_meta_input_of_a_meta_model():
    with torch.device("meta"):
        model = nn.Sequential(LlamaLike(), nn.LayerNorm(N))
        x = torch.randn(2, 3, N)
    patch(model)
    y = model(x)
    assert y.is_meta and y.shape == x.shape


class RaisesAnything(LlamaLike):
    def forward(self, x):
        raise StopAsyncIteration("what no one expects")


class Tagged(LlamaLike):
    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)


ODD = {
    "neither layer_norm nor rms_norm": lambda: RaisesAnything(),
    "its class cannot be subclassed: TypeError": lambda: Tagged(),
    "it is parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.LayerNorm(N), dim=None),
}


@pytest.mark.parametrize("reason", ODD)
def test_odd_modules_are_left_and_the_others_fused(reason):
    model = nn.Sequential(nn.LayerNorm(N), ODD[reason](), LlamaLike())
    report = patch(model)
    assert [site.path for site in report.fused] == ["0", "2"]
    assert reason in next(site.reason for site in report.skipped if site.path == "1")


def test_an_attribute_that_cannot_be_hashed():
    model = holder(LlamaLike())
    model[0].groups = ([1], [2])
    assert patch(model).coverage == {"norm": (1, 1)}


def test_a_probe_that_cannot_be_set_up():
    class OddNorm(Weightless):
        normalized_shape = ("all",)

    model = holder(OddNorm())
    with pytest.warns(UserWarning):
        (site,) = patch(model).skipped
    assert "probing it failed: TypeError" in site.reason


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_is_another_in_training_is_left(training):
    class Noisy(nn.LayerNorm):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, self.training)

    model = holder(Noisy(N)).train(training)
    state = torch.get_rng_state()
    with pytest.warns(UserWarning):
        (site,) = patch(model).skipped
    assert torch.equal(torch.get_rng_state(), state)
    assert training or "its output differs between training and eval mode" in site.reason
