"""patch recognises rotary functions, rejects look-alikes, and keeps their calls working."""

import importlib
import types
import weakref

import pytest
import torch
from axes import grid
from torch import nn

from fusedops.patching import patch, unpatch
from fusedops.patching.lines.rotary import site as rotary
from fusedops.patching.lines.rotary import trial
from fusedops.patching.lines.rotary.branches import BRANCHES
from fusedops.patching.lines.rotary.rotation import Rotation
from fusedops.patching.lines.rotary.trial import UNKNOWN
from fusedops.testing import yardstick
from patching.quiet import quietly
from patching.same import results

transformers = pytest.importorskip("transformers")

HEADS, WIDTH = 3, 8


def rotation_of(function):
    rotations = rotary.rotations_of(function)
    return rotations if isinstance(rotations, str) else rotations[()]


# Functions as models have them. `rotate_half` stands in this module as it does in theirs.


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotary_llama(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotary_partial(q, k, cos, sin, unsqueeze_dim=1):
    n = cos.shape[-1]
    out = rotary_llama(q[..., :n], k[..., :n], cos, sin, unsqueeze_dim)
    return tuple(torch.cat([y, x[..., n:]], -1) for y, x in zip(out, (q, k), strict=True))


def rotary_back(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    out = rotary_llama(q.float(), k.float(), cos, sin, unsqueeze_dim)
    return out[0].to(q.dtype), out[1].to(k.dtype)


# Functions that are none, or that no call may be spared.


def rotary_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_llama(q, k, cos, -sin, unsqueeze_dim)


def rotary_of_q(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_llama(q, k, cos, sin, unsqueeze_dim)[0], k


def rotary_scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = rotary_llama(q, k, cos, sin, unsqueeze_dim)
    return q * 1.01, k


def rotary_detached(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_llama(q.detach(), k, cos, sin, unsqueeze_dim)


def rotary_in_place(q, k, cos, sin, unsqueeze_dim=1):
    out = rotary_llama(q, k, cos, sin, unsqueeze_dim)
    return q.copy_(out[0]), k.copy_(out[1])


def rotary_in_bfloat16(q, k, cos, sin, unsqueeze_dim=1):
    out = rotary_llama(q.bfloat16(), k.bfloat16(), cos, sin, unsqueeze_dim)
    return out[0].to(q.dtype), out[1].to(k.dtype)


def rotary_wide(q, k, cos, sin, unsqueeze_dim=1):
    """The results of 16-bit q and k with a 16-bit table are float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return rotary_llama(q.to(wide), k.to(wide), cos, sin, unsqueeze_dim)


def rotary_at_one_dim(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_llama(q, k, cos, sin)


def rotary_reordered(q, k, cos, sin, unsqueeze_dim=1):
    """DeepSeek's: takes pairs as neighbours and returns them as halves."""
    apart = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return rotary_llama(*apart, cos, sin, unsqueeze_dim)


def rotary_of_three(q, k, cos, sin, unsqueeze_dim=1):
    return *rotary_llama(q, k, cos, sin, unsqueeze_dim), q + k.mean()


def rotary_at_no_dim(q, k, cos, sin, unsqueeze_dim=None):
    return rotary_llama(q, k, cos, sin)


def rotary_swapped(q, k, sin, cos):
    return rotary_llama(q, k, cos, sin)


def rotary_of_more(q, k, cos, sin, positions):
    return rotary_llama(q, k, cos[:, positions], sin[:, positions])


def rotary_raises(q, k, cos, sin):
    raise KeyError("never")


def rotary_of_few(q, k, cos, sin, unsqueeze_dim=1):
    """More positions than a run of it may have."""
    if q.shape[-2] > 6:
        q = q * 2
    return rotary_llama(q, k, cos, sin, unsqueeze_dim)


def doubled(q):
    return q * (1 + (q.shape[-2] > 6))


def rotary_with_a_helper(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_llama(doubled(q), k, cos, sin, unsqueeze_dim)


SCALE = 1.0


def rotary_of_a_global(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_llama(q * SCALE, k, cos, sin, unsqueeze_dim)


def within(scale):
    def rotary_of_a_closure(q, k, cos, sin, unsqueeze_dim=1):
        return rotary_llama(q * scale, k, cos, sin, unsqueeze_dim)

    return rotary_of_a_closure


rotary_of_a_closure = within(1.0)


SHAPE = trial.OTHER
OTHER_RESULTS = [rotary_backwards, rotary_of_q, rotary_scaled, rotary_detached, rotary_in_place]
OTHER_RESULTS += [
    rotary_in_bfloat16,
    rotary_wide,
    rotary_at_one_dim,
    rotary_reordered,
    rotary_of_three,
]
REFUSED = {
    **dict.fromkeys(OTHER_RESULTS, UNKNOWN),
    rotary_of_more: SHAPE,
    rotary_at_no_dim: "its unsqueeze_dim is None, not 1 or 2",
    rotary_raises: "running it raised KeyError",
    rotary_of_few: BRANCHES,
    rotary_with_a_helper: BRANCHES,
    rotary_of_a_global: "it reads SCALE, whose changes cannot be detected",
    rotary_of_a_closure: "it reads scale, whose changes cannot be detected",
}


rotary_now = rotary_llama  # what the models below call


class Attention(nn.Module):
    """An attention's lines around the rotary call."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(WIDTH * HEADS, WIDTH * HEADS) for _ in range(2))

    def forward(self, x, cos, sin):
        shape = (*x.shape[:-1], HEADS, WIDTH)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        q, k = rotary_now(q, k, cos, sin)
        return q @ k.transpose(2, 3)


class HeadsLast(Attention):
    def forward(self, x, cos, sin):
        shape = (*x.shape[:-1], HEADS, WIDTH)
        q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        out = rotary_now(q, k, cos, sin, unsqueeze_dim=2)
        return out[0] @ out[1].transpose(2, 3)


class Viewed(Attention):
    def forward(self, x, cos, sin):
        q = self.q_proj(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        q, k = rotary_now(q, q, cos, sin)
        return q.view(-1, WIDTH) + k.reshape(-1, WIDTH)


class Starred(Attention):
    def forward(self, x, cos, sin):
        table = cos, sin
        q = self.q_proj(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        q, k = rotary_now(q, q, *table)
        return q @ k.transpose(2, 3)


@pytest.fixture(autouse=True)
def no_function_is_known(monkeypatch):
    for name in ("_rotations", "_probed"):
        monkeypatch.setattr(rotary, name, type(getattr(rotary, name))())
    use(monkeypatch, rotary_llama)


def use(monkeypatch, function):
    monkeypatch.setitem(globals(), "rotary_now", function)


@pytest.fixture
def calls(recorded):
    """Returns the dtypes of q in calls of the fused function, once it is used in earnest."""
    return recorded(rotary, "rotary_embedding", lambda q, *_, **options: q.dtype)


def inputs(dtype=torch.float32, table=None, rotary=WIDTH):
    torch.manual_seed(1)
    x, angle = torch.randn(2, 5, WIDTH * HEADS), torch.randn(2, 5, rotary)
    return x.to(dtype), angle.cos().to(table or dtype), angle.sin().to(table or dtype)


def build(cls=Attention):
    torch.manual_seed(0)
    return nn.Sequential(cls())[0]


def patched_sites(model):
    report = quietly(patch, model, linear=False)
    return [site for site in [*report.fused, *report.skipped] if site.kind == "rotary"]


@grid(
    cls=[Attention, HeadsLast],
    function=[rotary_llama, rotary_partial, rotary_back],
    dtype=[torch.float32, torch.bfloat16],
    table=[torch.float32, torch.bfloat16],
)
def test_fused(cls, function, dtype, table, monkeypatch, calls):
    use(monkeypatch, function)
    model, args = build(cls).to(dtype), inputs(dtype, table)
    before = results(model, *args) if function is rotary_back or dtype == table else None
    exact = results(build(cls).double(), *(a.double() for a in args))
    (site,) = patched_sites(model)
    assert site.now == "rotary_embedding" and "rotary_now(q, k, cos, sin" in site.was
    if before is not None:
        del calls[:]
        after = results(model, *args)
        assert calls == [dtype]
        for got, eager, true in zip(after, before, exact, strict=True):
            assert yardstick(got, eager, true) is None
        unpatch(model)
        assert all(map(torch.equal, results(model, *args), before))


def test_a_table_of_part_of_a_head(monkeypatch, calls):
    use(monkeypatch, rotary_partial)
    model, args = build(), inputs(rotary=4)
    before = results(model, *args)
    patched_sites(model)
    del calls[:]
    torch.testing.assert_close(results(model, *args), before)
    assert len(calls) == 1


def test_what_the_function_refuses_stays_refused():
    """It takes no part of a head, and the fused function would."""
    model = build()
    patched_sites(model)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(*inputs(rotary=4))


@pytest.mark.parametrize("function", REFUSED)
def test_left_with_the_reason(function, monkeypatch):
    use(monkeypatch, function)
    (site,) = patched_sites(build())
    assert not site.now and site.reason == REFUSED[function]


def test_a_view_of_what_lies_otherwise(monkeypatch):
    """A partial function gives contiguous tensors, and the fused one keeps the projection's."""
    use(monkeypatch, rotary_partial)
    (site,) = patched_sites(build(Viewed))
    assert site.reason == rotary.VIEWED
    assert build(Viewed)(*inputs()).isfinite().all()


def test_a_call_that_is_not_read():
    (site,) = patched_sites(build(Starred))
    assert site.reason == rotary.FORM


def test_a_source_that_is_not_there(tmp_path):
    namespace: dict = {"Attention": Attention, "rotary_now": rotary_llama}
    lines = "class Made(Attention):\n    def forward(self, x, cos, sin):\n"
    exec(f"{lines}        return rotary_now(x, x, cos, sin)", namespace)
    (site,) = patched_sites(build(namespace["Made"]))
    assert site.reason.startswith("the source of its forward")


def test_another_function_in_its_place_is_called(monkeypatch, calls):
    """As Liger puts one into the module; a new patch has a look at it."""
    model, args = build(), inputs()
    patched_sites(model)
    use(monkeypatch, rotary_scaled)
    del calls[:]
    expected = build()(*args)
    assert torch.equal(model(*args), expected) and not calls
    assert patched_sites(model)[0].reason == UNKNOWN
    use(monkeypatch, rotary_llama)
    assert patched_sites(model)[0].now


@pytest.mark.parametrize("function", [rotary_llama, rotary_back])
def test_another_helper_is_looked_at_again(function, monkeypatch):
    """And a helper of a helper."""
    assert isinstance(rotation_of(function), Rotation)
    monkeypatch.setitem(globals(), "rotate_half", lambda x: -x)
    assert rotation_of(function) == UNKNOWN


def test_a_function_that_nobody_else_holds_goes():
    function = types.FunctionType(rotary_llama.__code__, globals(), "rotary", (1,))
    assert isinstance(rotation_of(function), Rotation)
    seen = weakref.ref(function)
    del function
    assert seen() is None


def test_a_bug_of_ours_is_no_reason_to_leave_a_function(monkeypatch):
    def raises(*args, **kwargs):
        raise KeyError("never")

    monkeypatch.setattr(trial, "rotary_embedding", raises)
    with pytest.raises(KeyError, match="never"):
        rotation_of(rotary_llama)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_and_device_do_not_matter(default):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        with torch.device("meta"):
            assert isinstance(rotation_of(rotary_llama), Rotation)
    finally:
        torch.set_default_dtype(before)


class Subclass(torch.Tensor):
    pass


def test_calls_that_run_the_function(calls):
    model, (x, cos, sin) = build(), inputs()
    patched_sites(model)
    odd = {
        "a subclass": (x, cos.as_subclass(Subclass), sin),
        "a gradient of cos": (x, cos.clone().requires_grad_(), sin),
        "a table for other positions": (x[:, :1], cos, sin),
        "another batch": (x[:1], cos, sin),
    }
    del calls[:]
    for args in odd.values():
        torch.testing.assert_close(model(*args), build()(*args))
    assert not calls
    model.double()
    assert torch.equal(model(x.double(), cos, sin), build().double()(x.double(), cos, sin))
    assert not calls


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "cohere", "glm4", "gpt_oss", "olmo2"])
def test_generation_with_a_cache(kind):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    grouped = {} if kind == "gpt_neox" else {"num_key_value_heads": 2}
    wide = {"head_dim": 8, "num_local_experts": 4} if kind in ("glm4", "gpt_oss") else {}
    config = transformers.AutoConfig.for_model(kind, **sizes, **grouped, **wide)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 64, (2, 5))
    kwargs = {"max_new_tokens": 6, "do_sample": False}
    before = model.generate(ids, **kwargs)
    patch(model)
    assert torch.equal(model.generate(ids, **kwargs), before)
    unpatch(model)
    assert torch.equal(model.generate(ids, **kwargs), before)


# What transformers' own functions are seen to be: interleaved, partial, back, the table.
KNOWN = {
    "llama": (False, False, False, "_full"),
    "gpt_neox": (False, True, False, "_full"),
    "olmo2": (False, False, True, "_full"),
    "modernbert": (False, False, True, "_full"),
    "cohere": (True, False, True, "_full"),
    "glm4": (True, True, False, "_first_half"),
    "ernie4_5": (True, False, True, "_first_half"),
    "gpt_oss": (False, False, False, "_twice"),
    "openai_privacy_filter": (True, False, False, "_neighbours"),
}


@pytest.mark.parametrize("model", KNOWN)
def test_functions_of_transformers(model):
    theirs = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    rotation = rotation_of(theirs.apply_rotary_pos_emb)
    assert (
        rotation.interleaved,
        rotation.partial,
        rotation.back,
        rotation.table.__name__,
    ) == KNOWN[model]
    assert not rotation.cast and rotation.dim == 1


def test_vision_functions_unsqueeze_by_themselves():
    theirs = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    rotation = rotation_of(theirs.apply_rotary_pos_emb_vision)
    assert rotation.dim == -2 and rotation.back
    q, k = torch.randn(7, 3, 8), torch.randn(7, 2, 8)
    angle = torch.randn(7, 8)
    args = q, k, angle.cos(), angle.sin()
    ours = rotation.by(rotary.rotary_embedding, *args, None)
    torch.testing.assert_close(ours, theirs.apply_rotary_pos_emb_vision(*args))
