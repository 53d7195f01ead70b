"""Quantized models keep the bits of their logits through each way to save and load them."""

import copy
import io
import pickle

import pytest
import torch
from axes import grid
from patching.architectures import ENCODER_DECODERS, GPT, GROUPED, PLAIN, WIDE

import fusedops
from fusedops.nn import QuantizedExperts, QuantizedLinear

transformers = pytest.importorskip("transformers")
dcp = pytest.importorskip("torch.distributed.checkpoint")

MODELS = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "tied llama": ("LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "bert": ("BertForMaskedLM", PLAIN),
    "t5": ("T5ForConditionalGeneration", ENCODER_DECODERS["t5"]),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
MODELS = {name: (cls, sizes | {"vocab_size": 96}) for name, (cls, sizes) in MODELS.items()}
FORMATS = ["int8", "int4", "nf4", "fp8"]
IDS = torch.arange(14).view(2, 7)


def build(name, seed=0):
    torch.manual_seed(seed)
    cls, sizes = MODELS[name]
    kind = getattr(transformers, cls)
    return kind(kind.config_class(**sizes)).eval()


def in_memory(change):
    def changed(name, format, folder, seed=0):
        model = build(name, seed)
        change(model, format)
        return model

    return changed


def on_load(name, format, folder, seed=0):
    build(name, seed).save_pretrained(folder / "floats")
    config = fusedops.QuantizationConfig(format)
    kind = getattr(transformers, MODELS[name][0])
    return kind.from_pretrained(folder / "floats", quantization_config=config)


QUANTIZES = {
    "quantize": in_memory(fusedops.quantize),
    "patch": in_memory(lambda model, format: fusedops.patch(model, quantize=format)),
    "from_pretrained": on_load,
    "low_latency": in_memory(lambda model, format: fusedops.low_latency(model, quantize=format)),
}


def through_folder(**options):
    def sent(model, fresh, folder):
        model.save_pretrained(folder, **options)
        assert "max_shard_size" not in options or len([*folder.glob("*.safetensors")]) > 1
        return type(model).from_pretrained(folder)

    return sent


def through_state_dict(model, fresh, folder):
    receiver = fresh()
    receiver.load_state_dict(model.state_dict())
    return receiver


def through_torch_save(model, fresh, folder):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_dcp(model, fresh, folder):
    dcp.save(model.state_dict(), checkpoint_id=folder)
    receiver = fresh()
    dcp.load(receiver.state_dict(), checkpoint_id=folder)
    return receiver


WAYS = {
    "save_pretrained": through_folder(),
    "shards": through_folder(max_shard_size="20KB"),
    "state_dict": through_state_dict,
    "torch.save": through_torch_save,
    "pickle": lambda model, fresh, folder: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, fresh, folder: copy.deepcopy(model),
    "dcp": through_dcp,
}


def logits(model):
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **more).logits


def quantized(model):
    kinds = QuantizedLinear, QuantizedExperts
    return {path: type(m) for path, m in model.named_modules() if isinstance(m, kinds)}


@pytest.mark.filterwarnings("ignore:quantize. nothing was quantized")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@grid(
    name=MODELS,
    way=WAYS,
    how=QUANTIZES,
    format=FORMATS,
    only=lambda name, how, **_: (name, how) != ("bert", "low_latency"),
)
def test_logits_keep_their_bits(name, way, how, format, tmp_path):
    model = QUANTIZES[how](name, format, tmp_path)
    loaded = WAYS[way](model, lambda: QUANTIZES[how](name, format, tmp_path, 1), tmp_path / "codes")
    fusedops.unpatch(model)
    fusedops.unpatch(loaded)
    assert quantized(loaded) == quantized(model) and quantized(model)
    assert torch.equal(logits(loaded), logits(model))
    if way in ("save_pretrained", "shards"):
        assert not any("weight" in key for key in loading_errors(model, tmp_path / "codes"))


def test_low_latency_is_for_models_that_generate():
    model = build("bert")
    with pytest.raises(TypeError, match="low_latency: model must be a transformers model that"):
        fusedops.low_latency(model, quantize="int8")
    assert not quantized(model) and not hasattr(model.config, "quantization_config")


def loading_errors(model, folder):
    """The names that transformers reports as missing or unexpected."""
    _, info = type(model).from_pretrained(folder, output_loading_info=True)
    return {*info["missing_keys"], *info["unexpected_keys"]}
