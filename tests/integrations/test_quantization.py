"""QuantizationConfig quantizes a model's weights on load; quantized checkpoints are reloaded."""

import copy
import json
import sys

import pytest
import torch
from children import forked
from patching.architectures import GROUPED
from torch import nn

import fusedops
from fusedops import integrations
from fusedops.nn import QuantizedLinear

transformers = pytest.importorskip("transformers")
AutoModel = transformers.AutoModelForCausalLM
FORMATS = {
    "int8": {"group_size": 32, "input_format": "int8", "compute": "exact"},
    "int4": {"group_size": 32},
    "nf4": {"scale": "mse"},
    "fp8": {},
}
IDS = torch.arange(14).view(2, 7)
TINY = GROUPED | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 99}
TINY |= {"attention_bias": True}


def llama(folder=None, **config):
    """Returns a small Llama with nonzero biases, saved if a folder is given."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    if folder is not None:
        model.save_pretrained(folder)
    return model


def config(format="nf4", **options):
    return fusedops.QuantizationConfig(format, **options)


def load(folder, *args, kind=AutoModel, **kwargs):
    quantization = {"quantization_config": config(*args)} if args else {}
    return kind.from_pretrained(folder, **quantization, **kwargs)


def paths(model):
    return {path for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    as_bytes = torch.uint8
    return a.keys() == b.keys() and all(
        torch.equal(t.reshape(-1).view(as_bytes), b[name].reshape(-1).view(as_bytes))
        and t.dtype == b[name].dtype
        for name, t in a.items()
    )


@pytest.mark.parametrize("format", FORMATS)
def test_floats_are_quantized_and_codes_come_back(format, tmp_path):
    expected = llama(tmp_path / "floats")
    options = FORMATS[format]
    fusedops.quantize(expected, format, **options)
    model = AutoModel.from_pretrained(
        tmp_path / "floats", quantization_config=config(format, **options)
    )
    assert same(model, expected) and len(paths(model)) == 14 and model.hf_quantizer.is_trainable
    assert model.model.layers[0].mlp.up_proj.path == "model.layers.0.mlp.up_proj"
    model.save_pretrained(tmp_path / "codes")
    loaded = load(tmp_path / "codes")
    assert same(loaded, model) and paths(loaded) == paths(model)
    assert repr(loaded) == repr(model)  # with every option of the layers
    assert loaded.config.quantization_config.to_dict() == config(format, **options).to_dict()
    assert torch.equal(loaded(IDS).logits, expected(IDS).logits)


def test_dtype_device_map_and_shards(tmp_path):
    dtype = torch.bfloat16
    llama().save_pretrained(tmp_path / "floats", max_shard_size="60KB")
    expected = AutoModel.from_pretrained(tmp_path / "floats", dtype=dtype)
    fusedops.quantize(expected, "nf4")
    model = load(tmp_path / "floats", "nf4", dtype=dtype, device_map="cpu")
    assert same(model, expected) and model.model.layers[0].mlp.up_proj.dtype == dtype
    model.save_pretrained(tmp_path / "codes", max_shard_size="60KB")
    assert len(list((tmp_path / "codes").glob("*.safetensors"))) > 1
    for kwargs in ({}, {"device_map": "cpu"}, {"device_map": "auto"}):
        assert same(load(tmp_path / "codes", **kwargs), expected)
    other = load(tmp_path / "codes", dtype=torch.float32)
    assert other.model.layers[0].mlp.up_proj.dtype == other.lm_head.weight.dtype == torch.float32
    assert torch.equal(
        other.model.layers[0].mlp.up_proj.absmax, expected.model.layers[0].mlp.up_proj.absmax
    )


def test_a_tied_head_and_skip(tmp_path):
    llama(tmp_path / "floats", tie_word_embeddings=True)
    tied = load(tmp_path / "floats", "nf4")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    given = config(skip=())
    tied = AutoModel.from_pretrained(tmp_path / "floats", quantization_config=given)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight and len(paths(tied)) == 14
    given = config(skip=("layers.1", "lm_head"))
    model = AutoModel.from_pretrained(tmp_path / "floats", quantization_config=given)
    assert len(paths(model)) == 7 and not any(".1." in path for path in paths(model))
    model.save_pretrained(tmp_path / "codes")
    assert same(load(tmp_path / "codes"), model)


def test_routers_and_what_stays_float32(tmp_path):
    torch.manual_seed(0)
    kwargs = {"num_local_experts": 4, "num_experts_per_tok": 2}
    plain = TINY.copy()
    plain.pop("attention_bias")
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**plain, **kwargs)).eval()
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, vocab_size=99, decoder_start_token_id=0)
    ).eval()
    for name, model in {"mixtral": mixtral, "t5": t5}.items():
        model.save_pretrained(tmp_path / name)
        fusedops.quantize(model, "int8")
        loaded = load(tmp_path / name, "int8", kind=type(model))
        assert paths(loaded) == paths(model) != set()
        assert same(loaded, model)
        loaded.save_pretrained(tmp_path / f"{name} codes")
        assert same(load(tmp_path / f"{name} codes", kind=type(model)), model)
    assert not any("wo" in path or "gate" in path for path in paths(t5) | paths(mixtral))


@pytest.mark.parametrize(
    "name,router,options",
    [
        ("SwitchTransformersForConditionalGeneration", "router.classifier", {"num_layers": 2}),
        ("JetMoeForCausalLM", "router.layer", {}),
        (
            "LongcatFlashForCausalLM",
            "router.classifier",
            {"num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2},
        ),
    ],
)
def test_linears_of_routers_stay(name, router, options):
    """Routers are the linears inside a module of this name."""
    kind = getattr(transformers, name)
    config = kind.config_class(num_hidden_layers=2, **options)
    with torch.device("meta"):
        model = kind(config)
    report = fusedops.quantize(model, "int8")
    left = {site.path for site in report.skipped if site.reason == "it routes tokens to experts"}
    assert left and all(path.endswith(router) for path in left)
    assert not any("router" in site.path for site in report.fused)


def test_a_head_that_the_checkpoint_lacks_stays_in_floats(tmp_path):
    llama(tmp_path / "floats")
    kind = transformers.LlamaForSequenceClassification
    given = config()
    model = kind.from_pretrained(tmp_path / "floats", quantization_config=given, num_labels=3)
    assert given.skip == ["lm_head"]
    assert type(model.score) is nn.Linear and model.score.weight.requires_grad
    assert model.score.weight.abs().sum() > 0 and len(paths(model)) == 14
    assert model.config.quantization_config.skip == ["lm_head", "score"]
    model.save_pretrained(tmp_path / "codes")
    assert same(load(tmp_path / "codes", kind=kind), model)


def test_a_head_of_another_shape_stays_in_floats(tmp_path):
    kind = transformers.LlamaForSequenceClassification
    kind(transformers.LlamaConfig(**TINY, num_labels=2)).save_pretrained(tmp_path / "floats")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path / "floats", "nf4", kind=kind, num_labels=5)
    kwargs = {"num_labels": 5, "ignore_mismatched_sizes": True}
    model = load(tmp_path / "floats", "nf4", kind=kind, **kwargs)
    assert type(model.score) is nn.Linear and model.score.weight.shape == (5, 64)
    model.save_pretrained(tmp_path / "codes")
    assert same(load(tmp_path / "codes", kind=kind), model)


def test_back_to_floats(tmp_path):
    llama(tmp_path)
    model = load(tmp_path, "int8")
    expected = copy.deepcopy(model.model.layers[0].mlp.up_proj.weight + 0)
    floats = model.dequantize()
    assert paths(floats) == set() and not hasattr(floats.config, "quantization_config")
    assert torch.equal(floats.model.layers[0].mlp.up_proj.weight, expected)


def test_back_to_floats_with_an_activation():
    model = llama()
    gate = model.model.layers[0].mlp.gate_proj
    with_activation = fusedops.nn.Linear(gate.in_features, gate.out_features, activation="silu")
    with_activation.load_state_dict(gate.state_dict(), strict=False)
    model.model.layers[0].mlp.gate_proj = with_activation
    fusedops.quantize(model, "int8", compute="exact")
    expected = model(IDS).logits
    assert (model.dequantize()(IDS).logits - expected).norm() < 1e-5 * expected.norm()


def test_scales_that_are_not_finite_are_warned_of(tmp_path):
    llama(tmp_path)
    model = load(tmp_path, "nf4")
    model.model.layers[1].mlp.up_proj.absmax[0] = torch.nan
    folder = tmp_path / "codes"
    model.save_pretrained(folder)
    with pytest.warns(UserWarning, match=r"model.layers.1.mlp.up_proj.absmax has 1 of 96 scales"):
        load(folder)


def test_errors():
    with pytest.raises(ValueError, match=r"format must be one of .* got 'int3'"):
        config("int3")
    with pytest.raises(ValueError, match="group_size of int4"):
        config("int4", group_size=48)
    with pytest.raises(ValueError, match="compute='int8' needs"):
        config("nf4", input_format="int8", compute="int8")
    with pytest.raises(TypeError, match="skip must be a list of names, got 'lm_head'"):
        config(skip="lm_head")
    with pytest.raises(AttributeError, match="no attribute 'Quantization'"):
        _ = fusedops.Quantization


def test_a_folder_of_floats_that_says_it_has_codes(tmp_path):
    llama(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text()) | {"quantization_config": config().to_dict()}
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"has no model.layers.0.*qweight and .*absmax"):
        load(tmp_path)


def test_another_version_of_transformers_works_without_us(monkeypatch):
    monkeypatch.setitem(integrations.AFTER_IMPORT, "another", "fusedops.integrations.missing")
    monkeypatch.setitem(sys.modules, "another", json)
    before = sys.meta_path[:]
    try:
        with pytest.warns(
            UserWarning, match="could not register fusedops with another: No module named"
        ):
            integrations.install()
    finally:
        sys.meta_path[:] = before


@pytest.mark.parametrize("first", ["fusedops", "transformers"])
def test_the_import_is_enough_and_imports_no_transformers(first):
    lines = f"""
import sys
import {first}
assert {first == "transformers"} or "transformers" not in sys.modules
import fusedops
from transformers.quantizers import auto
assert "fusedops" in auto.AUTO_QUANTIZER_MAPPING
assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["fusedops"] is fusedops.QuantizationConfig
assert auto.__spec__.loader is auto.__loader__ and auto.__loader__.get_source(auto.__name__)
"""
    transformers_first = first == "transformers"
    forked("-c", lines, large=transformers_first, bare=not transformers_first).printed()
