"""Layers that a quantized checkpoint lacks, such as new heads, stay in floats."""

import logging
from itertools import cycle

import pytest
import torch
from patching.architectures import DECODERS, ENCODER_DECODERS, ENCODERS, WIDE
from torch import nn

import fusedops
from fusedops.nn import QuantizedExperts, QuantizedLinear

transformers = pytest.importorskip("transformers")
IDS = torch.arange(3, 17).view(2, 7)
IDS[:, -1] = 2  # T5 classifies at the token that ends a sequence
MOE = WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Model type -> the class that is quantized and saved, its sizes, and classes with other heads.
TYPES = {
    "llama": (
        "LlamaForCausalLM",
        DECODERS["llama"],
        {
            "LlamaForSequenceClassification": {"score"},
            "LlamaForTokenClassification": {"score"},
            "LlamaForQuestionAnswering": {"qa_outputs"},
            "LlamaModel": set(),
        },
    ),
    "bert": (
        "BertForMaskedLM",
        ENCODERS["bert"],
        {
            "BertModel": {"pooler.dense"},
            "BertForSequenceClassification": {"bert.pooler.dense", "classifier"},
            "BertForTokenClassification": {"classifier"},
            "BertForQuestionAnswering": {"qa_outputs"},
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        ENCODER_DECODERS["t5"] | {"classifier_dropout": 0.0},
        {
            "T5ForSequenceClassification": {
                "classification_head.dense",
                "classification_head.out_proj",
            },
            "T5ForTokenClassification": {"classifier"},
            "T5ForQuestionAnswering": {"qa_outputs"},
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        MOE,
        {
            "Qwen3MoeForSequenceClassification": {"score"},
            "Qwen3MoeForTokenClassification": {"score"},
            "Qwen3MoeForQuestionAnswering": {"qa_outputs"},
        },
    ),
}
# transformers gives these classes' bodies another name, and does not map a checkpoint's.
RENAMED = [("transformer", "llama"), ("transformer", "qwen3_moe")]
HEADS = [(name, head) for name, (_, _, heads) in TYPES.items() for head in heads]


def kind_of(name):
    return getattr(transformers, name)


def saved(name, format, folder):
    """A quantized model of the type, whose folder has codes."""
    cls, sizes, _ = TYPES[name]
    torch.manual_seed(0)
    model = kind_of(cls)(kind_of(cls).config_class(**sizes)).eval()
    fusedops.quantize(model, format)
    model.save_pretrained(folder)
    return model


def core(model):
    """The model without its head."""
    return getattr(model, model.base_model_prefix, model)


def hidden(model):
    """The hidden states of the part that models of a type share; T5 for tokens has no decoder."""
    part = core(model)
    with torch.no_grad():
        if model.config.model_type != "t5":
            return [part(input_ids=IDS)[0]]
        states = part.encoder(input_ids=IDS)[0]
        decoder = getattr(part, "decoder", None)
        more = [decoder(input_ids=IDS, encoder_hidden_states=states)[0]] if decoder else []
        return [states, *more]


def quantized(model):
    kinds = QuantizedLinear, QuantizedExperts
    return {path for path, m in model.named_modules() if isinstance(m, kinds)}


def outputs(model):
    with torch.no_grad():
        return [t for t in model(input_ids=IDS).to_tuple() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(
    "name,head,format",
    [(*place, format) for place, format in zip(HEADS, cycle(["int8", "nf4"]), strict=False)],
)
def test_a_new_head_is_in_floats_over_the_codes(name, head, format, tmp_path, caplog):
    base = saved(name, format, tmp_path / "codes")
    new = TYPES[name][2][head]
    kind = kind_of(head)
    options = {} if "QuestionAnswering" in head else {"num_labels": 3}
    if (kind.base_model_prefix, name) in RENAMED:
        with pytest.raises(ValueError, match=r"no weights for transformer.* of model.*key_mapping"):
            kind.from_pretrained(tmp_path / "codes", **options)
        options["key_mapping"] = {"^model": "transformer"}
    with caplog.at_level(logging.WARNING, logger="fusedops"):
        model = kind.from_pretrained(tmp_path / "codes", **options)
    assert model.config.quantization_config.skip == ["lm_head", *sorted(new, key=order(model))]
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("fusedops")]
    reason = "is not quantized: the checkpoint has no weights for it"
    assert {*lines} == {f"from_pretrained: {path} {reason}" for path in new}
    for path in new:
        linear = model.get_submodule(path)
        assert type(linear) is nn.Linear and linear.weight.requires_grad
        assert linear.weight.isfinite().all() and linear.weight.abs().sum() > 0

    assert quantized(core(model)) <= quantized(core(base)) and quantized(core(model))
    assert all(map(torch.equal, hidden(model), hidden(base)))

    model.train()
    sum(t.float().sum() for t in model(input_ids=IDS).to_tuple() if is_float(t)).backward()
    read = [p for p in new if p != "pooler.dense" or head == "BertModel"]
    assert all(model.get_submodule(path).weight.grad.abs().sum() > 0 for path in read)

    model.eval().save_pretrained(tmp_path / "with head")
    again = kind.from_pretrained(tmp_path / "with head", **options)
    assert quantized(again) == quantized(model)
    assert all(map(torch.equal, outputs(again), outputs(model)))


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad


def order(model):
    paths = [path for path, _ in model.named_modules()]
    return paths.index


@pytest.mark.parametrize("part", ["qweight", "absmax", "both"])
def test_a_layer_that_lost_codes_is_no_new_head(part, tmp_path):
    from safetensors.torch import load_file, save_file

    saved("bert", "nf4", tmp_path)
    layer = "bert.encoder.layer.1.output.dense"  # it has a bias
    lost = {f"{layer}.{name}" for name in ("qweight", "absmax") if part in (name, "both")}
    file = tmp_path / "model.safetensors"
    save_file({k: t for k, t in load_file(file).items() if k not in lost}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{tmp_path} has no {layer}"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_a_body_of_another_name_is_refused(tmp_path):
    model = transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**DECODERS["llama"]))
    fusedops.quantize(model, "int8")
    model.save_pretrained(tmp_path)
    for kind in (transformers.LlamaModel, transformers.LlamaForCausalLM):
        with pytest.raises(ValueError, match=r"codes of \w+\.layers\.\d"):
            kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_the_head_of_codes_has_another_size(format, tmp_path, caplog):
    kind = transformers.BertForSequenceClassification
    model = kind(transformers.BertConfig(**ENCODERS["bert"], num_labels=3)).eval()
    fusedops.quantize(model, format)
    model.save_pretrained(tmp_path)
    rows = (80, 48) if format == "nf4" else (5, 3)  # nf4 has one list of codes
    unfit = r"classifier.qweight must be \w+ \[{}, \d+\], .* has \w+ \[{}, \d+\]".format(*rows)
    with pytest.raises(ValueError, match=rf"{unfit}.*pass ignore_mismatched_sizes=True"):
        kind.from_pretrained(tmp_path, num_labels=5)
    with caplog.at_level(logging.WARNING, logger="fusedops"):
        loaded, info = kind.from_pretrained(
            tmp_path, num_labels=5, ignore_mismatched_sizes=True, output_loading_info=True
        )
    weight, bias = ("classifier.weight", (3, 32), (5, 32)), ("classifier.bias", (3,), (5,))
    assert info["mismatched_keys"] == {weight, bias}
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert "classifier is not quantized: the checkpoint has a weight of another" in caplog.text
    assert loaded.config.quantization_config.skip == ["lm_head", "classifier"]
    assert type(loaded.classifier) is nn.Linear and loaded.classifier.weight.abs().sum() > 0
    assert quantized(core(loaded)) == quantized(core(model))
    assert all(map(torch.equal, hidden(loaded), hidden(model)))
    loaded.save_pretrained(tmp_path / "again")
    again = kind.from_pretrained(tmp_path / "again")
    assert all(map(torch.equal, outputs(again), outputs(loaded)))


@pytest.mark.parametrize("quantized_first", [False, True])
def test_a_module_with_two_paths(quantized_first, tmp_path):
    """A file may have one name for both; the class ties the modules again."""
    from safetensors.torch import save_file

    class Twice(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[1].mlp = self.model.layers[0].mlp

    model = Twice(transformers.LlamaConfig(**DECODERS["llama"])).eval()
    given = {} if quantized_first else {"quantization_config": fusedops.QuantizationConfig("nf4")}
    if quantized_first:
        fusedops.quantize(model, "nf4")
    model.config.save_pretrained(tmp_path)
    tensors = {k: t for k, t in model.state_dict().items() if "layers.1.mlp" not in k}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = Twice.from_pretrained(tmp_path, **given)
    if not quantized_first:
        fusedops.quantize(model, "nf4")
    assert len(quantized(loaded)) == 11 and torch.equal(*(m(IDS).logits for m in (loaded, model)))
    assert loaded.model.layers[0].mlp is loaded.model.layers[1].mlp


@pytest.mark.parametrize("skip", [[], ["roberta.encoder"]])
def test_a_block_of_two_layers_whose_names_are_another_heads(skip, tmp_path):
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**ENCODERS["roberta"]))
    fusedops.quantize(model, "nf4", skip=skip)
    model.save_pretrained(tmp_path)
    assert "lm_head.dense" in quantized(model)
    loaded = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded.classifier.dense) is nn.Linear
    assert quantized(core(loaded)) == quantized(core(model))


def test_a_head_whose_name_was_a_block_of_two_layers(tmp_path):
    settings = transformers.RobertaConfig(**ENCODERS["roberta"])
    model = transformers.RobertaForSequenceClassification(settings)
    fusedops.quantize(model, "int8")
    model.save_pretrained(tmp_path)
    loaded = transformers.RobertaForTokenClassification.from_pretrained(tmp_path)
    assert type(loaded.classifier) is nn.Linear
    assert quantized(core(loaded)) == quantized(core(model)) != set()
