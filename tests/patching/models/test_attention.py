"""patch(attention=True) makes transformers models run fusedops' attention, with equal results."""

import copy
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
from axes import grid

import fusedops
from fusedops.patching import Site, patch, patched, unpatch
from fusedops.patching.core.kinds import only
from fusedops.patching.models.attention import interface
from fusedops.patching.models.attention import site as attention

transformers = pytest.importorskip("transformers")
from transformers import AttentionInterface  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

from patching.models.attention_models import LLAMA, MODELS, batch, build  # noqa: E402

ALONE = only("attention")
DECODERS = "llama", "gemma2", "gpt_oss", "gpt2"
EAGER = "gemma2", "gpt_oss"  # unless told otherwise
TWO = "t5", "whisper"  # encoder and decoder
pytestmark = pytest.mark.usefixtures("any_size")


def outputs(model, name, side=None, **more):
    """Returns a model's outputs at positions that are not padding."""
    kwargs = batch(name, side)
    out = model(**kwargs, **more)
    shown = kwargs.get("attention_mask")
    logits = out.logits
    return logits if shown is None or name == "t5" else logits[shown.bool()]


@pytest.mark.parametrize("name", MODELS)
def test_report_and_unpatch(name):
    model = build(name)
    was, expected = model.config._attn_implementation, outputs(model, name)
    held, before = configs(model), [copy.deepcopy(vars(config)) for config in configs(model)]
    report = patch(model, **ALONE)
    sites = MODELS[name][3]
    assert report.coverage == {"attention": (sites, sites)}
    assert {site.now for site in report.fused} == {"attention"}
    assert {site.was.split("/")[1] for site in report.fused} == {was}
    assert patch(model, **ALONE) == report
    changed = [new for new, old in zip(configs(model), held, strict=True) if new is not old]
    assert [config._attn_implementation for config in changed] == ["fusedops"] * sites
    assert [vars(config) for config in held] == before
    unpatch(model)
    assert all(new is old for new, old in zip(configs(model), held, strict=True))
    assert torch.equal(outputs(model, name), expected)


def configs(model):
    base = transformers.PreTrainedConfig
    return [v for m in model.modules() for v in vars(m).values() if isinstance(v, base)]


def names(model):
    """Returns the implementation that the modules read."""
    return {config._attn_implementation for config in configs(model)}


def test_a_site_says_what_was_and_is():
    site = patch(build("llama"), **ALONE).fused[1]
    assert site == Site("model.layers.1.self_attn", "attention", "LlamaAttention/sdpa", "attention")


@grid(side=[None, "left", "right"], name=MODELS)
def test_same_outputs_loss_and_gradients(name, side, calls):
    """Compares with verify's yardstick."""
    if name == "whisper" and side:
        pytest.skip("it takes no attention_mask")
    model, given = build(name), batch(name, side)
    labels = (given.get("decoder_input_ids") if name in TWO else given["input_ids"]).clone()
    if side and name not in TWO:  # also of the token that a padding position predicts
        labels[given["attention_mask"].roll(1, 1) * given["attention_mask"] == 0] = -100
    patch(model, verify={**given, "labels": labels}, **ALONE)
    last = calls[-MODELS[name][3] :]  # of the model, after those of the probe
    assert len(last) == MODELS[name][3]
    assert side is None or any(call["bias"] is not None for call in last)


BUGS = {
    "mask": ("llama", "left", {"bias": None}),
    "bias": ("t5", None, {"bias": None}),
    "scale": ("gpt2", None, {"scale": 0.3}),
    "causal": ("llama", None, {"causal": False}),
    "softcap": ("gemma2", None, {"softcap": None}),
    "sinks": ("gpt_oss", None, {"sinks": None}),
}


@pytest.mark.parametrize("bug", BUGS)
def test_verify_sees(bug, monkeypatch):
    """verify catches a function that drops an argument, and restores the model."""
    name, side, wrong = BUGS[bug]
    model = build(name, **({"attn_logit_softcapping": 2.0} if bug == "softcap" else {}))
    config = model.config
    monkeypatch.setattr(attention, "_agree", lambda *_: True)
    run = interface.attention
    monkeypatch.setattr(interface, "attention", lambda *a, **k: run(*a, **{**k, **wrong}))
    with pytest.raises(RuntimeError, match="verify found differences"):
        patch(model, verify=batch(name, side), **ALONE)
    assert model.config is config and names(model) == {"eager" if name in EAGER else "sdpa"}


@grid(cache=["dynamic", "static"], side=[None, "left"], name=[*DECODERS, "t5", "whisper"])
def test_generate(name, side, cache, calls):
    """Greedy tokens and their logits are equal."""
    if name == "whisper" and (side or cache == "static"):
        pytest.skip("it takes no attention_mask, and makes its own cache")
    model, kwargs = build(name), batch(name, side)
    kwargs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "cache_implementation": cache, "disable_compile": True}
    if name == "whisper":
        options = {"max_new_tokens": 7, "do_sample": False}
    with torch.no_grad():
        want = model.generate(**kwargs, **options)
        assert not calls
        with patched(model, **ALONE):
            got = model.generate(**kwargs, **options)
    assert len(calls) > 7
    if name == "whisper":
        assert torch.equal(got, want)
        return
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)


def test_softcap_sinks_and_scale_arrive(calls):
    for name in ("gemma2", "gpt_oss"):
        model = build(name)
        patch(model, **ALONE)
        calls[:] = calls[: -len(calls) if name == "gemma2" else 2]  # without those of the probe
        outputs(model, name)
    assert [call["softcap"] for call in calls] == [50.0, 50.0, None, None]
    assert [call["sinks"] is None for call in calls] == [True, True, False, False]
    assert {call["scale"] for call in calls} == {256**-0.5, 8**-0.5}


def test_a_mask_that_causal_says_is_not_made(calls):
    model = build("llama")
    patch(model, **ALONE)
    outputs(model, "llama")
    assert [(call["causal"], call["bias"]) for call in calls] == [(True, None)] * 2


def test_only_this_model_is_told():
    """Neither a second model with this config nor a later one changes."""
    config = transformers.LlamaConfig(**LLAMA)
    model_a, model_b = build("llama", config), build("llama", config)
    assert model_a.config is model_b.config
    patch(model_a, **ALONE)
    later = build("llama", config)
    for model in (model_b, later):
        assert model.config is config
        assert names(model) == {"sdpa"}
    model_a.model.layers[0].self_attn.config.use_cache = False
    assert not config.use_cache
    unpatch(model_a)
    assert model_a.config is config and names(model_a) == {"sdpa"}


def test_sub_configs():
    text = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text |= {"num_hidden_layers": 2, "vocab_size": 64, "eos_token_id": 2}
    vision = {**text, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    kwargs = {"input_ids": torch.tensor([[3, 4, 2]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    want = model(**kwargs).logits_per_image
    report = patch(model, **ALONE)
    assert report.coverage == {"attention": (4, 4)}
    assert model.config is config and config.text_config is model.text_model.config
    assert {c._attn_implementation for c in (config, *parts(config))} == {"sdpa"}
    torch.testing.assert_close(model(**kwargs).logits_per_image, want)
    unpatch(model)
    assert names(model) == {"sdpa"}


def parts(config):
    return config.text_config, config.vision_config


@pytest.mark.parametrize("writer", ["pickle", "torch.save"])
def test_files_load_without_fusedops(writer):
    """Saved configs name the original implementation."""
    model = build("gemma2")
    patch(model, **ALONE)
    want = outputs(model, "gemma2")
    if writer == "pickle":
        text = pickle.dumps(model)
        new = pickle.loads(text)
    else:
        torch.save(model, file := io.BytesIO())
        text = file.getvalue()
        new = torch.load(io.BytesIO(text), weights_only=False)
    assert b"fusedops" not in text
    assert names(new) == {"eager"} and len(set(map(id, configs(new)))) == 1
    torch.testing.assert_close(outputs(new, "gemma2"), want)


def test_save_pretrained(tmp_path):
    model = build("llama")
    patch(model, **ALONE)
    want = outputs(model, "llama")
    model.save_pretrained(tmp_path)
    assert "fusedops" not in (tmp_path / "config.json").read_text()
    assert json.loads(model.config.to_json_string(use_diff=False))
    new = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert new.config._attn_implementation == "sdpa"
    torch.testing.assert_close(outputs(new, "llama"), want)


def test_deepcopy_stays_patched_and_is_a_model_of_its_own(calls):
    model = build("llama")
    config = model.config
    patch(model, **ALONE)
    new = copy.deepcopy(model)
    assert new.config is not model.config
    outputs(new, "llama")
    assert len(calls) == 2
    new.config.use_cache = False
    assert not new.model.layers[0].self_attn.config.use_cache and config.use_cache
    unpatch(new)
    assert new.config is new.model.layers[0].self_attn.config and names(new) == {"sdpa"}
    assert names(model) == {"sdpa", "fusedops"}
    new.config.use_cache = True
    assert new.config.to_dict() == build("llama").config.to_dict()


def test_strict_and_failure_leave_the_config(monkeypatch):
    model = build("llama")
    config = model.config
    monkeypatch.setattr(sys.modules["fusedops.patching.patch"], "_judge", raises)
    with pytest.raises(RuntimeError, match="later"):
        patch(model, **ALONE)
    assert model.config is config and names(model) == {"sdpa"}


def test_verify_of_a_model_that_is_patched_already(calls):
    """It is compared with the unpatched model, and stays patched."""
    model = build("llama")
    patch(model, **ALONE)
    patch(model, verify=batch("llama", "left"), **ALONE)
    assert len(calls) == 4  # of two layers in two runs
    assert names(model) == {"sdpa", "fusedops"}


def raises(*_):
    raise RuntimeError("later")


def test_patched_puts_back_what_was_not_patched_before(calls):
    model = build("llama")
    patch(model, attention=False)
    with patched(model):
        assert names(model) == {"sdpa", "fusedops"}
    assert names(model) == {"sdpa"}
    patch(model)
    for _ in range(2):
        assert names(model) == {"sdpa", "fusedops"}
        with patched(model):
            unpatch(model)


def test_set_attn_implementation_by_the_user(calls):
    fusedops.register_attention()
    model = build("llama")
    want = outputs(model, "llama", "left")
    model.set_attn_implementation("fusedops")
    torch.testing.assert_close(outputs(model, "llama", "left"), want, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2
    assert patch(model, **ALONE).coverage == {"attention": (2, 2)}
    model.set_attn_implementation("sdpa")  # also of a model that is patched
    assert torch.equal(outputs(model, "llama", "left"), want)
    assert len(calls) == 2


def test_both_tables_have_the_name():
    fusedops.register_attention()
    assert AttentionInterface()["fusedops"] is interface.attention_forward
    assert "fusedops" in AttentionMaskInterface()


def test_importing_fusedops_imports_no_transformers():
    code = "import fusedops, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
