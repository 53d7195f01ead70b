"""quantize writes what from_pretrained needs, and from_pretrained never guesses a layer."""

import copy
import json
import re

import pytest
import torch
from axes import grid
from children import forked
from patching.architectures import GROUPED, PLAIN
from torch import nn

import fusedops
from fusedops.nn import QuantizedLinear

transformers = pytest.importorskip("transformers")
Llama = transformers.LlamaForCausalLM
IDS = torch.arange(14).view(2, 7)
Q = "model.layers.0.self_attn.q_proj"
FORMATS = {
    "int8": {"group_size": 16, "input_format": "int8"},
    "int4": {"group_size": 32, "scale": "absmax"},
    "nf4": {"scale": "mse", "compute": "exact"},
    "fp8": {},
}


def llama(seed=0, **sizes):
    torch.manual_seed(seed)
    return Llama(transformers.LlamaConfig(**GROUPED | sizes)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS)[0]


def codes(model):
    return {path: m.format for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def says(model):
    return model.config.quantization_config.to_dict()


def comes_back(model, folder, **options):
    """Whether a model that is saved and loaded is the same."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, **options)
    return codes(loaded) == codes(model) and torch.equal(logits(loaded), logits(model))


def without_config(model, folder):
    """Saves the model as older versions of fusedops did."""
    model.save_pretrained(folder)
    return rewrite(folder, quantization_config=None)


def rewrite(folder, **changes):
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def replace_tensors(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("format", FORMATS)
def test_the_model_is_what_from_pretrained_makes(format, tmp_path):
    model, options = llama(), FORMATS[format]
    model.save_pretrained(tmp_path / "floats")
    config = fusedops.QuantizationConfig(format, **options)
    expected = Llama.from_pretrained(tmp_path / "floats", quantization_config=config)
    fusedops.quantize(model, format, **options)
    assert says(model) == says(expected)
    for name in ("is_quantized", "quantization_method"):
        assert getattr(model, name) == getattr(expected, name)
    assert type(model.hf_quantizer) is type(expected.hf_quantizer)
    assert model.hf_quantizer.quantization_config is model.config.quantization_config
    assert model.config._is_quantized and model.hf_quantizer.pre_quantized is False
    assert all(m.config is model.config for m in model.modules() if hasattr(m, "config"))
    assert repr(Llama.from_pretrained(save(model, tmp_path / "codes"))) == repr(model)
    model.dequantize()
    assert not codes(model) and not hasattr(model.config, "quantization_config")
    assert comes_back(model, tmp_path / "floats again")


def save(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("patched", [False, True])
def test_a_model_that_shares_the_config_stays_as_it_was(patched, tmp_path):
    config = transformers.LlamaConfig(**GROUPED)
    first, second = Llama(config).eval(), Llama(config).eval()
    before, settings = logits(second), second.config.to_dict()
    if patched:
        fusedops.patch(first)
    fusedops.quantize(first, "nf4")
    fusedops.unpatch(first)
    assert second.config is config and second.config.to_dict() == settings
    assert not hasattr(config, "_is_quantized") and not hasattr(config, "quantization_config")
    assert {type(m.config) for m in first.modules() if hasattr(m, "config")} == {type(config)}
    assert comes_back(first, tmp_path / "first") and comes_back(second, tmp_path / "second")
    assert torch.equal(logits(second), before)


def test_fused_attention_keeps_its_view_of_the_new_config():
    model = llama()
    fusedops.patch(model)
    fusedops.quantize(model, "int8")
    attention = model.model.layers[0].self_attn
    assert attention.config._attn_implementation == "fusedops"
    assert attention.config.quantization_config is model.config.quantization_config
    fusedops.unpatch(model)
    assert attention.config is model.config


@pytest.mark.parametrize("second", [f for f in FORMATS if f != "int8"])
def test_two_formats(second, tmp_path):
    model = llama()
    fusedops.quantize(model, "int8", skip=["lm_head", "layers.1"], **FORMATS["int8"])
    fusedops.quantize(model, second, **FORMATS[second])
    assert {*codes(model).values()} == {"int8", second}
    assert set(says(model)["layers"]) == {p for p, f in codes(model).items() if f == second}
    assert says(model)["skip"] == ["lm_head"]
    assert comes_back(model, tmp_path)
    assert repr(Llama.from_pretrained(tmp_path)) == repr(model)


def test_a_head_and_layers_that_stay(tmp_path):
    model = llama()
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    fusedops.quantize(model, "nf4", skip=["layers.0.mlp"])
    assert "lm_head" in codes(model) and len(codes(model)) == 11
    assert says(model)["skip"] == ["layers.0.mlp", "model.layers.1.mlp.up_proj"]
    assert comes_back(model, tmp_path)


def test_a_head_of_another_name_that_is_quantized_later(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(**PLAIN, tie_word_embeddings=False)
    model = transformers.BertForMaskedLM(config).eval()
    fusedops.quantize(model, "int8")
    fusedops.quantize(model, "int8", skip=())
    assert "cls.predictions.decoder" in codes(model) and says(model)["skip"] == []
    assert comes_back(model, tmp_path)


@pytest.mark.filterwarnings("ignore:quantize. nothing was quantized")
def test_a_part_that_was_quantized_alone_is_refused(tmp_path):
    model = llama()
    fusedops.quantize(model.model.layers[0], "nf4")
    model.save_pretrained(tmp_path)
    call = r"fusedops\.quantize\(model, format\).* of a whole model"
    with pytest.raises(ValueError, match=rf"{tmp_path} has codes of model\.layers\.0\..*{call}"):
        Llama.from_pretrained(tmp_path)
    fusedops.quantize(model, "int8", skip=["lm_head", "layers.1"])  # nothing, but it writes
    assert comes_back(model, tmp_path)


def test_an_inner_model_is_saved_alone(tmp_path):
    """The model around it does not know: its checkpoint is refused, the inner one's is exact."""
    model = llama()
    fusedops.quantize(model.model, "int8")
    assert comes_back(model.model, tmp_path / "inner")
    assert not hasattr(model.config, "quantization_config")
    with pytest.raises(ValueError, match=r"has codes of model\.layers"):
        comes_back(model, tmp_path / "outer")


@grid(format=FORMATS, base=[False, True])
def test_codes_without_a_config(format, base, tmp_path):
    model, options = llama(), FORMATS[format]
    fusedops.quantize(model, format, **options)
    without_config(model.model if base else model, tmp_path)
    call = r"quantization_config=fusedops\.QuantizationConfig\(format\)"
    with pytest.raises(ValueError, match=rf"{tmp_path} has codes of .*qweight.*{call}.*{format}"):
        Llama.from_pretrained(tmp_path)
    config = fusedops.QuantizationConfig(format, **options)
    loaded = Llama.from_pretrained(tmp_path, quantization_config=config)
    assert says(loaded) == says(model) and codes(loaded) == codes(model)
    loaded.lm_head = model.lm_head
    assert torch.equal(logits(loaded), logits(model))


@grid(format=FORMATS, other=FORMATS, where=["call", "file"])
def test_codes_of_another_format_than_the_config_says(format, other, where, tmp_path):
    model = llama()
    fusedops.quantize(model, format)
    without_config(model, tmp_path)
    config = fusedops.QuantizationConfig(other)
    given = {"quantization_config": config} if where == "call" else {}
    if where == "file":
        rewrite(tmp_path, quantization_config=config.to_dict())
    if format == other:
        assert torch.equal(logits(Llama.from_pretrained(tmp_path, **given)), logits(model))
        return
    with pytest.raises(ValueError) as error:
        Llama.from_pretrained(tmp_path, **given)
    message = str(error.value)
    assert str(tmp_path) in message and Q in message and f"quantized to '{other}'" in message


def test_codes_in_a_state_dict(tmp_path):
    model, floats = llama(), llama(1)
    fusedops.quantize(model, "nf4")
    names = {"config": floats.config, "state_dict": model.state_dict()}
    with pytest.raises(
        ValueError, match=rf"the state dict has codes of {re.escape('model.layers.')}"
    ):
        Llama.from_pretrained(None, **names)
    loaded = Llama.from_pretrained(None, **names | {"config": model.config})
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(RuntimeError, match=rf"Unexpected key.*{Q}\.qweight"):
        floats.load_state_dict(model.state_dict())


def test_codes_that_the_config_skips(tmp_path):
    model = llama()
    fusedops.quantize(model, "nf4")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, quantization_config=says(model) | {"skip": ["lm_head", "layers.1"]})
    with pytest.raises(
        ValueError, match=r"has codes of model.layers.1.*remove what names .* `skip`"
    ):
        Llama.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["qzeros", "g_idx"])
def test_codes_of_other_packages_are_not_refused(name, tmp_path):
    def quantized(tensors):
        del tensors[f"{Q}.weight"]
        for part in ("qweight", "scales", name):
            tensors[f"{Q}.{part}"] = torch.zeros(1, dtype=torch.int32)

    llama().save_pretrained(tmp_path)
    replace_tensors(tmp_path, quantized)
    assert not codes(Llama.from_pretrained(tmp_path))


def test_one_layer_in_floats_that_the_config_does_not_skip(tmp_path):
    """As someone leaves a checkpoint who edits it: the floats are loaded as floats."""
    model = llama()
    fusedops.quantize(model, "nf4")
    model.save_pretrained(tmp_path)
    weight = torch.randn(32, 32)

    def edit(tensors):
        for name in ("qweight", "absmax"):
            del tensors[f"{Q}.{name}"]
        tensors[f"{Q}.weight"] = weight

    replace_tensors(tmp_path, edit)
    loaded = Llama.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_submodule(Q).weight, weight) and len(codes(loaded)) == 13
    assert says(loaded)["skip"] == ["lm_head", Q]


def test_adapters_that_were_saved_with_the_codes(tmp_path):
    peft = pytest.importorskip("peft")
    model = llama()
    fusedops.quantize(model, "nf4")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.base_model.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"has no {Q}\.qweight"):
        Llama.from_pretrained(tmp_path)
    without_config(adapted.base_model.model, tmp_path)
    with pytest.raises(ValueError, match=r"has codes of model\.layers"):
        Llama.from_pretrained(tmp_path)


@pytest.mark.parametrize("when", ["before", "after", "merged"])
def test_an_adapter_that_is_merged(when, tmp_path):
    peft = pytest.importorskip("peft")
    model = llama()
    skip = ["lm_head", "lora_A", "lora_B"]
    if when == "before":
        fusedops.quantize(model, "int8", skip=skip)
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    if when == "after":
        fusedops.quantize(adapted, "int8", skip=skip)
        assert adapted.config is adapted.base_model.model.config
    merged = adapted.merge_and_unload()
    if when == "merged":
        fusedops.quantize(merged, "int8", skip=skip)
    assert merged.is_quantized and len(codes(merged)) == 14
    assert comes_back(merged, tmp_path)


class Wrapper(nn.Module):
    """As SentenceTransformer's: a plain module around a model."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.project = encoder, nn.Linear(32, 8)


def test_a_model_inside_a_plain_module(tmp_path):
    encoder = transformers.BertModel(transformers.BertConfig(**PLAIN)).eval()
    wrapper = Wrapper(encoder)
    fusedops.quantize(wrapper, "int8")
    assert isinstance(wrapper.project, QuantizedLinear) and not hasattr(wrapper, "hf_quantizer")
    assert says(encoder)["skip"] == ["lm_head"] and comes_back(encoder, tmp_path)


def test_a_model_of_several_configs(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 48, "image_size": 16, "patch_size": 8}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GROUPED),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_id=63,
    )
    kind = transformers.LlavaForConditionalGeneration
    model, other = kind(config).eval(), kind(config).eval()
    fusedops.quantize(model, "nf4", skip=["lm_head", "vision_tower"])
    assert not hasattr(config.text_config, "_is_quantized") and other.config is config
    language = model.model.language_model
    assert language.config is model.config.text_config and language.config._is_quantized
    assert comes_back(model, tmp_path / "codes") and comes_back(other, tmp_path / "floats")


def test_patch_and_unpatch_keep_what_quantize_wrote(tmp_path):
    model = llama()
    with fusedops.patched(model, quantize="int8"):
        model.save_pretrained(tmp_path / "patched")
    assert comes_back(model, tmp_path / "unpatched")
    loaded = Llama.from_pretrained(tmp_path / "patched")
    assert torch.equal(logits(loaded), logits(model))
    again = copy.deepcopy(loaded)
    assert again.hf_quantizer is not loaded.hf_quantizer and comes_back(again, tmp_path / "copy")


def test_layers_must_have_formats():
    with pytest.raises(ValueError, match=r"layers\['a'\] must have a 'format'"):
        fusedops.QuantizationConfig("nf4", layers={"a": {}})
    with pytest.raises(ValueError, match=r"format must be one of .* got 'int3'"):
        fusedops.QuantizationConfig("nf4", layers={"a": {"format": "int3"}})


def offloaded(place):
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": place}
    return parts | {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}


def test_floats_on_the_disk_are_not_quantized(tmp_path):
    pytest.importorskip("accelerate")
    model = llama()
    model.save_pretrained(tmp_path / "floats")
    given = {"quantization_config": fusedops.QuantizationConfig("int8")}
    given |= {"offload_folder": tmp_path / "offloaded"}
    layer = r"model\.layers\.1\.self_attn\.q_proj on the disk.*save_pretrained"
    with pytest.raises(ValueError, match=layer):
        Llama.from_pretrained(tmp_path / "floats", device_map=offloaded("disk"), **given)
    little = {"device_map": "auto", "max_memory": {"cpu": 25_000}}
    with pytest.raises(ValueError, match=r"model\.layers\.\d.* on the disk"):
        Llama.from_pretrained(tmp_path / "floats", **little, **given)
    loaded = Llama.from_pretrained(tmp_path / "floats", device_map=offloaded("cpu"), **given)
    loaded.save_pretrained(tmp_path / "codes")
    given = {"device_map": offloaded("disk"), "offload_folder": tmp_path / "offloaded"}
    assert torch.equal(logits(Llama.from_pretrained(tmp_path / "codes", **given)), logits(loaded))


def test_without_fusedops_transformers_warns(tmp_path):
    """Nobody else can decode the codes, and transformers only logs that it knows no such method."""
    model = llama()
    fusedops.quantize(model, "nf4")
    model.save_pretrained(tmp_path)
    lines = f"""
import sys, transformers
transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r})
assert "fusedops" not in sys.modules
"""
    done = forked("-c", lines, large=True).result()
    assert done.returncode == 0, done.stderr
    assert "Unknown quantization type, got fusedops" in done.stdout + done.stderr
