"""GPT-2's Conv1D, a linear whose weight is [in, out]: quantized, saved, loaded, patched."""

import pytest
import torch
from torch import nn

import fusedops
from fusedops import patch, quantize, unpatch
from fusedops.nn import QuantizedLinear
from patching.architectures import GPT

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D  # noqa: E402

FORMATS = pytest.mark.parametrize("format", ["int8", "int4", "nf4", "fp8"])
IDS = torch.arange(14).view(2, 7)
WEIGHT = "transformer.h.0.attn.c_proj.weight"  # square


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT | {"n_embd": 64})
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += 0.1 * torch.randn_like(p) if name.endswith("bias") else 0
    return model


def load(folder, **options):
    return transformers.GPT2LMHeadModel.from_pretrained(folder, **options).eval()


def layers(model):
    return [m for m in model.modules() if isinstance(m, QuantizedLinear)]


@FORMATS
def test_it_is_the_linear_of_the_transposed_weight(format):
    model = gpt2()
    expected, linear = model(IDS).logits, nn.Linear(64, 192)
    conv = model.transformer.h[0].attn.c_attn
    linear.weight.data, linear.bias = conv.weight.data.t().clone(), conv.bias
    report = quantize(model, format)
    assert {(site.was, site.now) for site in report.fused} == {
        ("Conv1D", f"QuantizedLinear, {format}")
    }
    assert len(report.fused) == 8
    error = (model(IDS).logits - expected).norm() / expected.norm()
    assert error < (0.02 if format == "int8" else 0.2)
    layer = model.transformer.h[0].attn.c_attn
    assert layer.bias is conv.bias and "transposed=True" in repr(layer)
    assert (layer.in_features, layer.out_features) == (64, 192)
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), QuantizedLinear.from_linear(linear, format)(x))
    again = QuantizedLinear.from_linear(layer, "int8")  # another format of the same layer
    assert again.transposed and again.weight.shape == (192, 64)


@FORMATS
def test_floats_of_a_checkpoint_are_transposed(format):
    model, floats = gpt2(), gpt2().state_dict()
    quantize(model, format)
    expected = model(IDS).logits
    for layer in layers(model):
        layer.weight.data.zero_()
    model.load_state_dict(floats, strict=False)
    assert torch.equal(model(IDS).logits, expected)
    assert model.load_state_dict(model.state_dict()).missing_keys == []
    wide = WEIGHT.replace("c_proj", "c_attn")
    with pytest.raises(RuntimeError, match=r"c_attn.weight must be \[64, 192\], got \[192, 64\]"):
        model.load_state_dict({wide: floats[wide].t()}, strict=False)
    assert torch.equal(model(IDS).logits, expected)


@FORMATS
def test_from_pretrained_save_and_load(format, tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path / "floats")
    quantize(model, format)
    expected = model(IDS).logits
    config = fusedops.QuantizationConfig(format)
    loaded = load(tmp_path / "floats", quantization_config=config)
    assert len(layers(loaded)) == 8 and torch.equal(loaded(IDS).logits, expected)
    loaded.save_pretrained(tmp_path / "codes")
    again = load(tmp_path / "codes")
    assert len(layers(again)) == 8 and torch.equal(again(IDS).logits, expected)
    assert all(layer.transposed for layer in layers(again))
    numbers = again.transformer.h[0].attn.c_attn.weight + 0
    again.dequantize()
    conv = again.transformer.h[0].attn.c_attn
    assert type(conv) is Conv1D and torch.equal(conv.weight, numbers.t())
    assert conv.weight.is_contiguous() and (conv.nx, conv.nf) == (64, 192)
    assert (again(IDS).logits - expected).norm() < 0.01 * expected.norm()
    again.save_pretrained(tmp_path / "dequantized")
    assert torch.equal(load(tmp_path / "dequantized")(IDS).logits, again(IDS).logits)


@pytest.mark.parametrize("format,patched_first", [("int8", False), ("nf4", True)])
def test_patch(format, patched_first):
    model, expected = gpt2(), gpt2()
    quantize(expected, format)
    if patched_first:
        patch(model)
        assert len(quantize(model, format).fused) == 8
    else:
        report = patch(model, quantize=format)
        assert report.coverage["quantize"] == (8, 9)
    expected = expected(IDS).logits
    # bfloat16 rounds operands
    assert (model(IDS).logits - expected).norm() < 1e-3 * expected.norm()
    unpatch(model)
    assert torch.equal(model(IDS).logits, expected)


def test_a_subclass_is_left():
    class Masked(Conv1D):
        pass

    model = nn.Sequential(Conv1D(8, 8), Masked(8, 8))
    report = quantize(model, "int8")
    assert [site.path for site in report.fused] == ["0"]
    assert report.skipped[0].reason == "its class may do more than nn.Linear"
