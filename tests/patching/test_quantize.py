"""quantize and patch(quantize=...): replaced and skipped linear layers, and LoRA over them."""

import copy
import weakref

import pytest
import torch
from torch import nn

import fusedops
from fusedops import patch, quantize, unpatch
from fusedops.nn import QuantizedLinear
from patching.architectures import PLAIN

FORMATS = ("int8", "int4", "nf4", "fp8")


class Net(nn.Module):
    """Every kind of linear that there is a reason to leave, and two that there is none for."""

    _keep_in_fp32_modules = ("wo",)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.blocks = nn.ModuleList(nn.ModuleDict(self.block()) for _ in range(2))
        self.wo = nn.Linear(24, 24)
        self.tied = nn.Linear(24, 40, bias=False)
        self.tied.weight = self.embed.weight
        self.lm_head = nn.Linear(24, 40, bias=False)
        self.config = type("Config", (), {"num_experts": 4})()

    def block(self):
        attention = nn.MultiheadAttention(24, 2)  # out_proj is a subclass of nn.Linear
        up, gate = nn.Linear(24, 48), nn.Linear(24, 4)
        return {"up": up, "down": nn.Linear(48, 24), "gate": gate, "attention": attention}

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block["down"](torch.relu(block["up"](h)))
        return self.lm_head(self.wo(h))


def reasons(report):
    return {site.path: site.reason for site in report.skipped}


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_replaced_and_what_is_left(format):
    model = Net()
    ids = torch.arange(12).view(2, 6)
    expected = model(ids)
    report = quantize(model, format)
    assert [site.path for site in report.fused] == [
        f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")
    ]
    assert all(type(m) is QuantizedLinear for b in model.blocks for m in (b["up"], b["down"]))
    assert reasons(report) == {
        **{f"blocks.{i}.gate": "it routes tokens to experts" for i in range(2)},
        **{
            f"blocks.{i}.attention.out_proj": "its class may do more than nn.Linear"
            for i in range(2)
        },
        "wo": "the model keeps 'wo' in float32",
        "tied": "its weight is tied to another module's",
        "lm_head": "'lm_head' is in skip",
    }
    assert f"QuantizedLinear, {format}" in str(report)
    assert (model(ids) - expected).norm() < 0.1 * expected.norm()
    with pytest.warns(UserWarning, match="nothing was quantized"):
        quantize(model, format)


def test_skip_and_options():
    model = Net()
    report = quantize(model, "int8", skip=("blocks.1", "gate"), group_size=12, compute="exact")
    assert reasons(report)["blocks.1.up"] == "'blocks.1' is in skip"
    assert type(model.lm_head) is QuantizedLinear
    up = model.blocks[0]["up"]
    assert (up.group_size, up.compute, up.format) == (12, "exact", "int8")


def test_a_layer_at_two_places_stays_one():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert len(quantize(model, "nf4").fused) == 2
    assert model[0] is model[2] and type(model[0]) is QuantizedLinear


def test_hooks_and_the_model_itself_are_left():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *_: None)
    assert reasons(quantize(model, "int8")) == {"0": "it has hooks"}
    with pytest.warns(UserWarning, match="it is the model itself: use QuantizedLinear.from_linear"):
        quantize(nn.Linear(8, 8), "int8")


def test_an_activation_stays():
    model = nn.Sequential(fusedops.nn.Linear(8, 8, activation="gelu"))
    x = torch.randn(3, 8)
    expected = model(x)
    quantize(model, "int8")
    assert model[0].activation == "gelu"
    assert (model(x) - expected).norm() < 0.05 * expected.norm()


def test_one_layer_in_floats_at_a_time(monkeypatch):
    """Quantized weights are freed: live float weights belong to later layers."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    floats = [weakref.ref(layer.weight) for layer in model]
    alive = []
    quantized = QuantizedLinear._quantized

    def look(layer, weight):
        if not weight.is_meta:
            alive.append(sum(f() is not None for f in floats))
        return quantized(layer, weight)

    monkeypatch.setattr(QuantizedLinear, "_quantized", look)
    quantize(model, "int8")
    assert alive == [4, 3, 2, 1]


def test_the_state_dict_comes_back():
    model = Net()
    other = copy.deepcopy(model)
    quantize(model, "int4")
    quantize(other, "int4")
    with torch.no_grad():
        other.blocks[0]["up"].qweight.zero_()
    other.load_state_dict(model.state_dict(), strict=True)
    ids = torch.arange(6)[None]
    assert torch.equal(other(ids), model(ids))


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"quantize: model must be a torch.nn.Module, got dict"):
        quantize({}, "int8")
    model = Net()
    with pytest.raises(ValueError, match=r"format must be one of .* got 'int3'"):
        quantize(model, "int3")
    with pytest.raises(ValueError, match="group_size of int4"):
        quantize(model, "int4", group_size=48)
    with pytest.raises(ValueError, match="input_format must be None, 'int8' or 'fp8', got 'int4'"):
        quantize(model, "int4", input_format="int4")
    with pytest.raises(
        ValueError, match=r"group_size of fp8 must be None \(one scale per row\), got 64"
    ):
        quantize(model, "fp8", group_size=64)
    for skip in ("lm_head", None):
        with pytest.raises(TypeError, match=f"skip must be a list of names, got {skip!r}"):
            quantize(model, "int8", skip=skip)
    assert type(model.wo) is nn.Linear


transformers = pytest.importorskip("transformers")
TINY = PLAIN | {"hidden_size": 64, "intermediate_size": 96}
IDS = torch.arange(14).view(2, 7)


def llama(**config):
    torch.manual_seed(0)
    config = TINY | {"num_key_value_heads": 2} | config
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


@pytest.mark.parametrize("format", FORMATS)
def test_patch_quantizes_first_and_fuses_the_rest(format):
    model = llama()
    quantized = copy.deepcopy(model)
    quantize(quantized, format)
    expected = quantized(IDS).logits
    report = patch(model, quantize=format, strict=True)
    assert report.coverage["quantize"] == (14, 15) and report.coverage["norm"] == (5, 5)
    assert report.coverage["mlp"] == report.coverage["rotary"] == (2, 2)
    assert (model(IDS).logits - expected).norm() < 0.01 * expected.norm()
    unpatch(model)
    assert torch.equal(model(IDS).logits, expected)


def test_an_activation_behind_a_quantized_linear_is_called():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TINY)).eval()
    quantize(model, "int8")
    expected = model(IDS).last_hidden_state
    patch(model)
    assert (model(IDS).last_hidden_state - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_model_passes_gradients_to_its_inputs_and_norms(format):
    model = llama()
    quantize(model, format)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].input_layernorm.weight.grad.abs().sum() > 0


def test_a_tied_head_is_left_and_named():
    model = llama(tie_word_embeddings=True)
    report = quantize(model, "int8", skip=())
    assert reasons(report) == {"lm_head": "its weight is tied to another module's"}
