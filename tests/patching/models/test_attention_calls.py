"""Tests the attention function that transformers calls, and the reasons to skip a model."""

import importlib
import logging

import pytest
import torch
from axes import grid

from fusedops.patching import patch, unpatch
from fusedops.patching.core import attention as core_attention
from fusedops.patching.core.kinds import only
from fusedops.patching.models.attention import site as attention
from fusedops.patching.models.attention.interface import attention_forward

transformers = pytest.importorskip("transformers")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.models.gemma2 import modeling_gemma2  # noqa: E402

from patching.models.attention_models import MODELS, batch, build  # noqa: E402

ALONE = only("attention")
pytestmark = pytest.mark.usefixtures("any_size")


class Layer(torch.nn.Module):
    """The attributes that the functions read from a module."""

    def __init__(self, is_causal=True, groups=2):
        super().__init__()
        self.is_causal, self.num_key_value_groups, self.layer_idx = is_causal, groups, 0


def heads(queries=5, keys=5, dtype=torch.float64):
    q, k, v = (
        torch.randn(2, h, n, 8, dtype=dtype) for h, n in ((4, queries), (2, keys), (2, keys))
    )
    return [t.requires_grad_() for t in (q, k, v)]


def same(args, mask, layer=None, **kwargs):
    """As transformers' function: output and gradients."""
    results = []
    for function in (attention_forward, sdpa_attention_forward):
        out, weights = function(layer or Layer(), *args, mask, **kwargs)
        assert weights is None
        assert out.is_contiguous()
        leaves = [t for t in (*args, *kwargs.values()) if getattr(t, "requires_grad", False)]
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad(out, leaves, cotangent)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


SEEN = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]], dtype=torch.bool)[:, None, None]


@grid(scaling=[None, 0.7], is_causal=[None, True, False], module_is_causal=[True, False])
def test_causal_is_the_arguments_or_the_modules(module_is_causal, is_causal, scaling, calls):
    same(heads(), None, Layer(module_is_causal), is_causal=is_causal, scaling=scaling)
    assert calls[0]["causal"] is (module_is_causal if is_causal is None else is_causal)


@grid(kind=["bool", "float"], bias=[False, True])
def test_masks(kind, bias, calls):
    mask = SEEN if kind == "bool" else torch.where(SEEN, 0.25, -1e9).double()
    more = {"position_bias": torch.randn(1, 4, 5, 5).double().requires_grad_()} if bias else {}
    same(heads(), mask.expand(2, 1, 5, 5), **more)
    same(heads(), None, **more)
    same(heads(), None, Layer(False), **more)
    assert len(calls) == 3


def test_decode_and_static_caches(calls):
    same(heads(1, 5), None)
    same(heads(1, 5), SEEN)
    same(heads(3, 5), None)  # what a static cache is before its first token
    same(heads(3, 5), None, position_bias=torch.randn(1, 4, 3, 5).double())
    same(heads(3, 5), None, Layer(False))
    assert len(calls) == 5


def test_other_widths_of_values(calls):
    q, k, v = heads()
    same([q, k, v[..., :6]], SEEN)
    assert len(calls) == 1


def test_a_query_that_sees_nothing_gives_zeros():
    out, _ = attention_forward(Layer(), *heads(), torch.zeros(2, 1, 5, 5, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def messages(caplog):
    return [record.getMessage() for record in caplog.records if "fusedops" in record.name]


OTHERS = {
    "block_indices": ({"block_indices": torch.zeros(1)}, "block_indices is set"),
    "head_mask": ({"head_mask": torch.ones(4)}, "head_mask is set"),
    "output_attentions": ({"output_attentions": True}, "output_attentions is set"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_does_not_know_is_transformers(name, calls, caplog):
    more, reason = OTHERS[name]
    with caplog.at_level(logging.DEBUG, "fusedops"):
        same(heads(), SEEN, **more)
    assert not calls
    assert messages(caplog) == [f"Layer runs transformers' attention: {reason}"]


def test_a_device_without_a_kernel_is_transformers(calls, caplog, monkeypatch):
    monkeypatch.setattr(core_attention, "DEVICES", {"meta"})
    with caplog.at_level(logging.DEBUG, "fusedops"):
        same(heads(), None)
    assert not calls
    assert messages(caplog)[0].endswith("there is no kernel for cpu")


def test_another_scaled_dot_product_attention_is_called(calls, caplog, recorded):
    """torch's context parallelism puts one there, as do libraries of attention kernels."""
    sdpa_calls = recorded(torch.nn.functional, "scaled_dot_product_attention")
    with caplog.at_level(logging.DEBUG, "fusedops"):
        attention_forward(Layer(), *heads(), None)
    assert len(sdpa_calls) == 1 and not calls
    assert messages(caplog)[0].endswith("scaled_dot_product_attention has been replaced")
    model = build("gemma2")  # eager's attention never called it
    patch(model, **ALONE)
    calls.clear()
    model(**batch("gemma2"))
    assert len(calls) == 2 and len(sdpa_calls) == 1


def test_tensors_that_do_not_fit_are_transformers(calls, caplog):
    q, k, v = heads()
    with caplog.at_level(logging.DEBUG, "fusedops"):
        same([q[:1], k, v], None, Layer(False, 2))
        with pytest.raises(RuntimeError, match="dtype"):
            attention_forward(Layer(False), q, k.float(), v, None)
        same([q, k, v], torch.randn(2, 1, 5, 5).double())
        with pytest.raises(RuntimeError):
            attention_forward(Layer(False), q, k, v, torch.ones(2, 1, 5, 4, dtype=torch.bool))
    reasons = [message.partition(": ")[2] for message in messages(caplog)]
    assert reasons == [
        "the batch sizes differ",
        "the dtypes differ",
        "attention_mask does not broadcast to the scores",
    ]
    assert len(calls) == 1


def test_bools_that_eager_code_adds(calls):
    model, kwargs = build("llama"), batch("llama")
    model.set_attn_implementation("eager")
    kwargs["attention_mask"] = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    want = model(**kwargs).logits
    patch(model, **ALONE)
    calls.clear()
    assert torch.equal(model(**kwargs).logits, want) and not calls


def test_what_says_nothing_of_the_scores_is_passed_over(calls):
    same(heads(), SEEN, position_ids=torch.arange(5)[None], sliding_window=3, use_cache=True)
    same(heads(), SEEN, head_mask=None, output_attentions=False)
    assert len(calls) == 2


def test_softcap_and_sinks_are_never_lost(calls):
    """Where ours does not run, the model's eager code does: sdpa ignores sinks."""
    for name in ("gemma2", "gpt_oss"):
        model = build(name)
        want = model(**batch(name, "left"), output_attentions=True)
        patch(model, **ALONE)
        calls.clear()
        got = model(**batch(name, "left"), output_attentions=True)
        assert not calls
        shown = batch(name, "left")["attention_mask"].bool()
        torch.testing.assert_close(got.logits[shown], want.logits[shown])
        for ours, theirs in zip(got.attentions, want.attentions, strict=True):
            at = shown[:, None, :, None].expand_as(ours)
            torch.testing.assert_close(ours[at], theirs[at])


def test_weights_of_a_model_that_had_none(calls):
    model = build("llama")
    want = model(**batch("llama"), output_attentions=True).attentions
    patch(model, **ALONE)
    assert model(**batch("llama"), output_attentions=True).attentions == want
    assert not any(want)


# Training.


def gradients(model, name, side=None):
    kwargs = batch(name, side)
    torch.manual_seed(2)
    labels = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
    loss = model(**kwargs, labels=labels).loss
    leaves = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, leaves, allow_unused=True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "t5", "whisper"])
def test_gradient_checkpointing(name, calls):
    """The recomputed forward draws the same dropout."""
    model = build(name, **DROPOUT.get(name, {})).train()
    patch(model, **ALONE)
    calls.clear()
    want = gradients(model, name)
    sites = len(calls)
    assert calls[0]["dropout_p"] == (0.3 if name in DROPOUT else 0.0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = gradients(model, name)
    assert len(calls) == 3 * sites
    for recomputed, stored in zip(got, want, strict=True):
        assert (recomputed is None) == (stored is None)
        if recomputed is not None:  # gradients of tied weights are summed in another order
            torch.testing.assert_close(recomputed, stored)


DROPOUT = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.3},
    "t5": {"dropout_rate": 0.3},
}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_compile(name, calls):
    torch._dynamo.reset()  # recompiles for other tests count too
    model = build(name)
    patch(model, **ALONE)
    for side in (None, "left"):
        kwargs = batch(name, side)
        want = model(**kwargs).logits
        got = torch.compile(model, backend="aot_eager", fullgraph=name != "gpt_oss")(
            **kwargs
        ).logits
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name, calls):
    model, kwargs = build(name), batch(name)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(**kwargs).logits
        patch(model, **ALONE)
        calls.clear()
        got = model(**kwargs).logits
    assert len(calls) == MODELS[name][3]
    assert got.dtype == want.dtype
    off = (got - want).double().norm() / want.double().norm()
    assert off < 0.05


def test_bfloat16():
    model = build("llama").bfloat16()
    patch(model, verify=batch("llama", "left"), **ALONE)


# What is left, and why.


def left(model, **kwargs):
    with pytest.warns(UserWarning, match="nothing was fused"):
        report = patch(model, **{**ALONE, **kwargs})
    assert not report.fused
    (reason,) = {site.reason for site in report.skipped}
    return reason


def test_code_that_does_not_ask_for_the_function():
    model = transformers.BloomForCausalLM(BLOOM)
    config = model.config
    assert "AttentionInterface" in left(model)
    assert model.config is config


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2", "paged|eager"])
def test_an_implementation_that_was_chosen(name):
    model = build("llama")
    model.config._attn_implementation_internal = name
    assert left(model) == f"its implementation is set to {name}"
    assert model.config._attn_implementation == name


def test_weights_that_are_wanted():
    model = build("bert")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    assert left(model) == "output_attentions is set, so attention weights are needed"


def test_eager_is_replaced_where_it_computes_the_same(calls):
    model = build("bert")
    model.set_attn_implementation("eager")
    report = patch(model, verify=batch("bert", "right"), **ALONE)
    assert {site.was for site in report.fused} == {"BertSelfAttention/eager"}
    assert calls
    unpatch(model)
    assert model.config._attn_implementation == "eager"


def test_code_that_asks_for_a_name():
    model = build("gpt2")
    model.set_attn_implementation("eager")
    assert left(model) == "its code checks whether the implementation is eager"


def test_masks_by_top_k_stay_with_the_names_that_make_them():
    """DeepSeek V3.2 masks the keys that its indexer leaves out for "eager" and "sdpa" alone."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    assert "eager,sdpa" in attention._asked(modeling_deepseek_v32.DeepseekV32Attention)
    assert not attention._asked(modeling_gemma2.Gemma2Attention)


ASKING = """
from torch import nn

class Attention(nn.Module):
    pass

class Model(nn.Module):
    def forward(self, x):
        return x if self.config._attn_implementation == "sdpa" else -x

class Derived(Model):
    pass

"""
FUNCTION = """
def run(module, x):
    return x if module.config._attn_implementation == "eager" else -x
"""


def test_whose_code_asks_for_a_name(tmp_path, monkeypatch):
    """An attention reads its view, a model the config itself. A function may be given either."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, more, asked in (("asks_alone", "", set()), ("asks", FUNCTION, {"eager"})):
        (tmp_path / f"{name}.py").write_text(ASKING + more)
        home = importlib.import_module(name)
        assert attention._asked(home.Attention) == asked
        assert attention._asked(home.Model) == attention._asked(home.Derived) == {"sdpa", *asked}


def test_a_model_that_says_no(monkeypatch):
    cls = modeling_gemma2.Gemma2PreTrainedModel
    monkeypatch.setattr(cls, "_supports_flash_attn", False)
    assert "declares support for neither sdpa nor flash" in left(build("gemma2"))


def without_softcap(module, *args, softcap=None, **kwargs):
    return eager(module, *args, **kwargs)


def scaled_eager(module, *args, **kwargs):
    out, weights = eager(module, *args, **kwargs)
    return out * 1.01, weights


eager = modeling_gemma2.eager_attention_forward


@pytest.mark.parametrize("other", [without_softcap, scaled_eager])
def test_eager_code_that_gives_something_else(other, monkeypatch):
    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", other)
    assert left(build("gemma2")) == "its eager attention gives different results"


def test_sdpa_of_the_models_own(monkeypatch):
    table = transformers.AttentionInterface()
    table["sdpa"] = lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs)
    monkeypatch.setattr(modeling_gemma2, "ALL_ATTENTION_FUNCTIONS", table)
    model = build("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    assert left(model) == "its module uses another function for sdpa"


@pytest.mark.parametrize("side", [None, "left"])
def test_one_eager_attention_is_fused_beside_another_that_is_left(side, monkeypatch, calls):
    """All get the masks of numbers that the model makes."""
    model, kwargs = build("gemma2"), batch("gemma2", side)
    second = model.model.layers[1].self_attn
    same = attention._agree
    monkeypatch.setattr(attention, "_agree", lambda m, run: m is not second and same(m, run))
    shown = kwargs.get("attention_mask", torch.ones(2, 9)).bool()
    want = model(**kwargs).logits[shown]
    report = patch(model, **ALONE)
    assert [site.reason for site in report.skipped] == [
        "its eager attention gives different results"
    ]
    calls.clear()
    torch.testing.assert_close(model(**kwargs).logits[shown], want)
    assert len(calls) == 1


def test_one_eager_attention_beside_another_that_goes_its_own_way(calls):
    model = build("gemma2")
    want = model(**batch("gemma2")).logits
    model.model.pool = transformers.models.bloom.modeling_bloom.BloomAttention(BLOOM, layer_idx=0)
    report = patch(model, **ALONE)
    assert report.coverage == {"attention": (2, 3)}
    assert [site.reason for site in report.skipped] == [attention.ASIDE]
    torch.testing.assert_close(model(**batch("gemma2")).logits, want)


def test_one_that_goes_another_way_keeps_no_sdpa(calls):
    model = build("llama")
    model.model.pool = transformers.models.bloom.modeling_bloom.BloomAttention(BLOOM, layer_idx=0)
    assert patch(model, **ALONE).coverage == {"attention": (2, 3)}


BLOOM = transformers.BloomConfig(hidden_size=32, n_head=4, n_layer=2, vocab_size=64)


def test_torchs_own_attention_modules_are_kept():
    model = torch.nn.TransformerEncoderLayer(32, 4)
    with pytest.warns(UserWarning, match="nothing was fused"):
        (site,) = patch(model, **ALONE).kept
    assert (site.path, site.was) == ("self_attn", "MultiheadAttention")
