"""Padded batches train as without patch, also where a query sees no key."""

import pytest
import torch
import transformers
from axes import grid
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedops.patching import patch
from fusedops.patching.core.kinds import only
from fusedops.patching.yardstick import Yardstick, run
from patching.models.attention_models import HEADS, MODELS, START, TOKENS, WINDOWED, batch, build

pytestmark = pytest.mark.usefixtures("any_size")

BART = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2}
BART |= {"decoder_layers": 2, "max_position_embeddings": 64, **HEADS, **TOKENS, **START}
MORE = {
    "mt5": ("MT5ForConditionalGeneration", transformers.MT5Config, MODELS["t5"][2], 6),
    "umt5": ("UMT5ForConditionalGeneration", transformers.UMT5Config, MODELS["t5"][2], 6),
    "bart": ("BartForConditionalGeneration", transformers.BartConfig, BART, 6),
    "gemma3": ("Gemma3ForCausalLM", transformers.Gemma3TextConfig, WINDOWED, 2),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig, WINDOWED, 2),
}
PAIRS = "t5", "mt5", "umt5", "bart"  # an encoder and a decoder, both with masks of their own
ALONE = only("attention")
EAGER_ONLY = "gemma2", "gpt_oss"
NAMES = "llama", "gemma2", "gpt_oss", "bert", "t5", "whisper", *MORE
WAYS = [(n, i) for n in NAMES for i in ("eager", "sdpa") if i == "eager" or n not in EAGER_ONLY]
FLOATS = torch.float32, torch.bfloat16, torch.float16
HIDDEN = {"left": (slice(0, 5)), "right": slice(3, None), "row": slice(None)}


@pytest.fixture(autouse=True)
def more(monkeypatch):
    for name, model in MORE.items():
        monkeypatch.setitem(MODELS, name, model)


def model_of(name, implementation, dtype=torch.float32):
    model = build(name).to(dtype)
    model.set_attn_implementation(implementation)
    return model


def padded(name, side, dtype=torch.float32):
    """Two rows, the second padded. Every position has a label, so that every query counts."""
    kwargs = batch("t5" if name in PAIRS else name)
    ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, HIDDEN[side]] = 0
    if name in PAIRS:
        kwargs["decoder_attention_mask"] = torch.ones_like(ids)
        kwargs["decoder_attention_mask"][1, :3] = 0
    if name == "whisper":
        kwargs["input_features"] = kwargs["input_features"].to(dtype)
    hides = "decoder_attention_mask" if name == "whisper" else "attention_mask"
    return {**kwargs, hides: mask, "labels": ids.clone()}


def seen(kwargs, causal=True):
    """The mask of a decoder's attention, [B, 1, Q, K] bools."""
    mask = kwargs["attention_mask"].bool()[:, None, None].expand(-1, 1, 9, 9)
    return mask.tril() if causal else mask


@grid("name,implementation", WAYS, side=HIDDEN)
def test_loss_and_gradients(name, implementation, side):
    """verify compares them, and so the query's row: the next token's loss depends on it."""
    model = model_of(name, implementation)
    report = patch(model, **ALONE, verify=padded(name, side))
    assert [site.kind for site in report.fused] == ["attention"] * MODELS[name][3]


@grid(
    "name,implementation",
    [(n, i) for n, i in WAYS if n in ("llama", "gemma2", "bert", "t5")],
    dtype=FLOATS[1:],
    side=["left", "row"],
)
def test_in_16_bits(name, implementation, dtype, side):
    patch(model_of(name, implementation, dtype), **ALONE, verify=padded(name, side, dtype))


def test_every_kind_of_site(any_size):
    patch(model_of("gemma2", "eager"), verify=padded("gemma2", "left"))
    patch(model_of("t5", "sdpa"), verify=padded("t5", "row"))


@grid(name=["llama", "gemma2", "bert", "t5"], dtype=FLOATS[1:], side=["left", "row"])
def test_eager_models_under_autocast(name, dtype, side):
    """Their masks are not cast: the smallest float32 would become -inf, and the mean zeros."""
    model, kwargs = model_of(name, "eager"), padded(name, side)
    exact = run(model, kwargs)
    with torch.autocast("cpu", dtype):
        eager = run(model, kwargs)
        patch(model, **ALONE)
        fused = run(model, kwargs)
    for result in ("loss", "logits"):
        off, rounding = ((t[result] - exact[result]).norm() for t in (fused, eager))
        share = torch.finfo(dtype).eps * exact[result].norm()
        assert off <= 2 * rounding + share


@grid(
    name=["llama", "mistral", "bert"],
    implementation=["eager", "sdpa"],
    value=[torch.finfo(torch.float32).min, -1e9, -1e4, -torch.inf],
)
def test_a_mask_of_the_callers(name, implementation, value):
    """-inf gives zeros, as in sdpa; eager code gives NaN there, which the fused code does not."""
    model, kwargs = model_of(name, implementation), padded(name, "left")
    visible = seen(kwargs, causal=name != "bert")
    kwargs["attention_mask"] = torch.zeros(visible.shape).masked_fill(~visible, value)
    if implementation == "eager" and value == -torch.inf and name != "bert":
        loss = model(**kwargs).loss
        patch(model, **ALONE)
        assert loss.isnan() and model(**kwargs).loss.isfinite()
    else:
        patch(model, **ALONE, verify=kwargs)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_bools_of_the_callers_give_zeros_as_in_sdpa(name):
    model, kwargs = model_of(name, "sdpa"), padded(name, "left")
    patch(model, **ALONE, verify={**kwargs, "attention_mask": seen(kwargs, name != "bert")})


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name,side", [("gemma2", "left"), ("llama", "left"), ("t5", "row")])
def test_in_a_graph(name, side):
    model, kwargs = model_of(name, "eager"), padded(name, side)
    results = []
    for function in (model, torch.compile(model, backend="eager")):
        model.zero_grad()
        loss = function(**kwargs).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        patch(model, **ALONE)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@grid("name,implementation", [(n, i) for n, i in WAYS if n in ("llama", "gemma2", "mistral")],
      cache=["dynamic", "static"])  # fmt: skip
def test_generation_after_padding(name, implementation, cache):
    model, kwargs = model_of(name, implementation), batch(name, "left")
    options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "output_logits": True}
    options |= {"return_dict_in_generate": True, "disable_compile": True}
    options["cache_implementation"] = cache
    expected = model.generate(**kwargs, **options)
    patch(model, **ALONE)
    patched = model.generate(**kwargs, **options)
    assert torch.equal(patched.sequences, expected.sequences)
    torch.testing.assert_close(patched.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_the_yardstick_has_exact_gradients_where_torchs_kernel_has_not():
    """torch's CPU kernel takes probability 1, not 1 / n, for the keys of such a query."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(8, 24)

        def forward(self, x, mask):
            q, k, v = self.proj(x)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, mask)

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 6, 8)
    mask = torch.zeros(6, 6).index_fill(0, torch.tensor([0]), torch.finfo(torch.float32).min)
    yardstick = Yardstick(model, {"x": x, "mask": mask})
    with sdpa_kernel(SDPBackend.MATH):
        right = run(model, {"x": x, "mask": mask})
    torch.testing.assert_close({n: t.float() for n, t in yardstick.exact.items()}, right)


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_on_the_meta_device(name):
    """It has no autocast."""
    model, kwargs = model_of(name, "eager"), padded(name, "left")
    patch(model, **ALONE)
    logits = model.to("meta")(**{n: t.to("meta") for n, t in kwargs.items()}).logits
    assert logits.is_meta and logits.shape == (*kwargs["labels"].shape, 64)
