"""nn.QuantizedLinear.weight dequantizes when read and re-quantizes when written."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from fusedops.functional import dequantize_weight
from fusedops.nn import QuantizedLinear
from quantized_linear.cases import FORMATS, layer, same

KINDS = pytest.mark.parametrize("kind", FORMATS)


@KINDS
def test_its_weight_is_a_view_to_be_read(kind):
    module, _linear, x = layer(kind)
    weight = module.weight
    assert (weight.dtype, weight.shape, weight.device.type) == (torch.float32, (33, 70), "cpu")
    assert not weight.requires_grad and weight.data.shape == (33, 70)
    dense = dequantize_weight(module.quantized_weight)
    assert torch.equal(weight + 0, dense) and torch.equal(weight.T.contiguous(), dense.T)
    assert torch.equal(nn.functional.linear(x, weight), x @ dense.T)
    assert weight.float().norm() > 0 and "tensor" in repr(weight)
    for write in (lambda: weight.add_(1), lambda: weight.detach().zero_()):
        with pytest.raises(RuntimeError, match="weight is a read-only view of quantized codes"):
            write()
    weight[0].copy_(x[0])  # of a row of the numbers that were made
    assert torch.equal(module.weight + 0, dense)


@KINDS
def test_what_is_written_to_its_data_is_quantized(kind, caplog):
    module, linear, _ = layer(kind)
    format, options = FORMATS[kind]
    expected, codes = QuantizedLinear.from_linear(linear, format, **options), module.qweight
    module.path = "model.up"
    module.weight.data.zero_()
    assert not module.weight.count_nonzero() and module.qweight is codes
    module.weight.data = linear.weight
    assert same(module, expected)
    assert re.match(
        f"model.up: re-quantized the assigned weight to {format}; relative error 0.*, "
        "or .* relative to the change",
        caplog.messages[1],
    )
    twice = QuantizedLinear.from_linear(linear, format, **options)
    twice.weight.data.mul_(2)
    torch.testing.assert_close(twice.weight + 0, 2 * module.weight, rtol=0.2, atol=0.05)
    with pytest.raises(ValueError, match=r"weight must be \[33, 70\], got \[70, 33\]"):
        module.weight.data = linear.weight.T


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_taking_back_what_was_added_gives_the_codes_of_before(kind, dtype):
    module = layer(kind)[0].to(dtype)
    changes = [0.02 * torch.randn(33, 70) for _ in range(2)]
    at_first = copy.deepcopy(module)
    module.weight.data += changes[0]
    after_one = copy.deepcopy(module)
    module.weight.data = module.weight.data.clone() + changes[1].to(dtype)
    assert not same(module, after_one) and not same(after_one, at_first)
    for change, expected in zip(changes[::-1], (after_one, at_first), strict=True):
        module.weight.data -= change.to(dtype)
        assert same(module, expected)


def test_what_cannot_be_taken_back_is_quantized_anew(caplog):
    module, _, _ = layer("nf4")
    change = 0.1 * torch.randn(33, 70)
    at_first = copy.deepcopy(module)
    module.weight.data += change
    module.weight.data -= 0.9 * change
    assert not same(module, at_first) and len(caplog.records) == 2
    for forget in (
        lambda m: m.forget(),
        lambda m: m.load_state_dict(m.state_dict()),
        lambda m: setattr(m, "weight", m.weight),
    ):
        module = copy.deepcopy(at_first)
        module.weight.data += change
        assert module._before
        forget(module)
        assert not module._before
        module.weight.data -= change
        assert not same(module, at_first)
        caplog.clear()


def test_a_weight_that_is_assigned_is_quantized():
    module, linear, _ = layer("int4")
    module.weight = torch.zeros(33, 70)
    assert not module.weight.count_nonzero()
    module.weight = linear.weight
    assert same(module, QuantizedLinear.from_linear(linear, "int4"))
    assert "weight" not in dict(module.named_parameters())


@KINDS
def test_a_call_with_another_weight_gives_the_codes_back(kind):
    module, _, x = layer(kind)
    before = copy.deepcopy(module)
    zeros = {"weight": torch.zeros(33, 70)}
    found = torch.func.functional_call(module, zeros, (x,))
    assert torch.equal(found, module.bias.expand(5, -1)) and same(module, before)


def test_writes_that_are_no_sums():
    module, _, _ = layer("nf4")
    before = module.weight + 0
    module.weight.data += 1.0
    torch.testing.assert_close(module.weight + 0, before + 1, rtol=0.1, atol=0.1)
    module.weight.data[3] = 0
    assert not module.weight[3].any() and module.weight[4].any()
    with pytest.raises(RuntimeError, match="weight is a read-only view of quantized codes"):
        module.weight[0] = 0


def test_numbers_of_a_weight_leave_it():
    weight = layer("int4")[0].weight
    numbers = weight + 0
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(copied) is torch.Tensor and torch.equal(copied, numbers)
    assert (weight.numpy() == numbers.numpy()).all() and weight.tolist() == numbers.tolist()


def test_reading_what_a_weight_is_makes_no_numbers(monkeypatch):
    module, _, _ = layer("nf4")

    def refuse(*_):
        raise AssertionError("dequantized")

    for file in ("module", "weight"):
        name = f"fusedops.nn.quantized_linear.{file}.dequantize_weight"
        monkeypatch.setattr(name, refuse)
    weight = module.weight
    assert weight.dtype.is_floating_point and weight.device == module.qweight.device
    assert weight.numel() == 33 * 70 and weight.dim() == 2 and weight.data.dtype == weight.dtype


class Reader(nn.Module):
    """Forwards read a weight's dtype and multiply by the weight."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        x = x.to(self.inner.weight.dtype)
        return self.inner(x) + x @ self.inner.weight.T


@KINDS
def test_a_weight_is_read_under_compile_and_export(kind):
    torch.compiler.reset()
    module, x = Reader(layer(kind)[0]), torch.randn(5, 70)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))
