"""patch(attention=True) makes transformers models run fusedops' attention, with equal results."""

import copy

import pytest
import torch
from axes import grid

import fusedops
from fusedops.patching import patch, unpatch
from fusedops.patching.core.kinds import only
from fusedops.patching.models.attention import interface
from fusedops.patching.models.attention import site as attention

transformers = pytest.importorskip("transformers")
from transformers import AttentionInterface  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

from patching.models.attention_models import MODELS, batch, build  # noqa: E402

ALONE = only("attention")
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


@grid(
    side=[None, "left", "right"],
    name=MODELS,
    only=lambda name, side: name != "whisper" or side is None,  # it takes no attention_mask
)
def test_same_outputs_loss_and_gradients(name, side, calls):
    """Compares with verify's yardstick."""
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


def test_verify_of_a_model_that_is_patched_already(calls):
    """It is compared with the unpatched model, and stays patched."""
    model = build("llama")
    patch(model, **ALONE)
    patch(model, verify=batch("llama", "left"), **ALONE)
    assert len(calls) == 6  # of two layers: two runs, and one whose page faults are counted
    assert names(model) == {"sdpa", "fusedops"}


def raises(*_):
    raise RuntimeError("later")


def test_set_attn_implementation_by_the_user(calls):
    fusedops.register_attention()
    assert AttentionInterface()["fusedops"] is interface.attention_forward
    assert "fusedops" in AttentionMaskInterface()
    model = build("llama")
    want = outputs(model, "llama", "left")
    model.set_attn_implementation("fusedops")
    torch.testing.assert_close(outputs(model, "llama", "left"), want, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2
    assert patch(model, **ALONE).coverage == {"attention": (2, 2)}
    model.set_attn_implementation("sdpa")  # also of a model that is patched
    assert torch.equal(outputs(model, "llama", "left"), want)
    assert len(calls) == 2
