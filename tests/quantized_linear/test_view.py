"""nn.QuantizedLinear.weight dequantizes when read and re-quantizes when written."""

import copy
import pickle
import re

import pytest
import torch
from axes import grid
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
    module.weight = torch.zeros(33, 70)
    module.weight = linear.weight
    assert same(module, expected) and "weight" not in dict(module.named_parameters())
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


def rotation(size):
    """A matrix that turns vectors by up to a third of a circle."""
    skew = torch.randn(size, size) / size**0.5 / 3
    return torch.linalg.matrix_exp(skew - skew.T)


def adapter(name, n, k):
    """What an adapter makes of a weight [n, k] when it is merged, and how it is unmerged."""
    rows, columns = 1 + 0.3 * torch.randn(n, 1), torch.randn(k)
    low_rank, turn = 0.05 * torch.randn(n, 4) @ torch.randn(4, k), rotation(k)
    return {
        "IA3": (lambda w: w * rows.to(w.dtype), lambda w: w / (rows.to(w.dtype) + 1e-8)),
        "IA3 of inputs": (lambda w: w * columns.to(w.dtype), lambda w: w / columns.to(w.dtype)),
        "DoRA": (
            lambda w: (rows * (w + low_rank)).to(w.dtype),
            lambda w: (w / rows - low_rank).to(w.dtype),
        ),
        "LoRA": (lambda w: w + low_rank.to(w.dtype), lambda w: w - low_rank.to(w.dtype)),
        "OFT": (lambda w: (w @ turn.to(w)).to(w.dtype), lambda w: (w @ turn.T.to(w)).to(w.dtype)),
        "untrained": (lambda w: w * 1, lambda w: w / 1),
    }[name]


ADAPTERS = ["IA3", "IA3 of inputs", "DoRA", "LoRA", "OFT", "untrained"]


@grid(KINDS, name=ADAPTERS, dtype=[torch.float32, torch.bfloat16])
def test_undoing_a_write_gives_the_codes_of_before(kind, name, dtype):
    torch.manual_seed(0)
    module = layer(kind)[0].to(dtype)
    at_first = copy.deepcopy(module)
    for _ in range(2):  # the second adapter is trained between two merges of it
        merge, unmerge = adapter(name, 33, 70)
        module.weight.data = merge(module.weight.data.clone())
        module.weight.data = unmerge(module.weight.data.clone())
        assert same(module, at_first) and not module._before


@KINDS
@grid(size=[1.0, 1e-3])
def test_two_adapters_are_undone_in_turn(kind, size):
    torch.manual_seed(0)
    module, states = layer(kind)[0], []
    rows = [1 + size * 0.2 * torch.randn(33, 1) for _ in range(2)]
    changes = [size * 0.05 * torch.randn(33, 4) @ torch.randn(4, 70) for _ in range(2)]
    for factor, change in zip(rows, changes, strict=True):
        states.append(copy.deepcopy(module))
        module.weight.data = factor * (module.weight.data.clone() + change)
    for factor, change, expected in zip(rows[::-1], changes[::-1], states[::-1], strict=True):
        module.weight.data = module.weight.data / factor - change
        assert same(module, expected)


@grid(KINDS, merged=[1e-3, 0.1, 1.0], dtype=[torch.float32, torch.bfloat16])
def test_a_new_weight_is_not_taken_for_an_old_one(kind, merged, dtype):
    torch.manual_seed(0)
    module, linear, _ = layer(kind)
    module, linear = module.to(dtype), linear.to(dtype)
    read = module.weight.data.clone()

    def low_rank(size):
        return (size * linear.weight.std() * torch.randn(33, 4) @ torch.randn(4, 70) / 2).to(dtype)

    module.weight.data = read + low_rank(merged)
    after_merge = module.weight.data.clone()
    for weight in (
        *(after_merge + low_rank(size) for size in (1e-3, 0.01, 0.1, 1.0)),
        *(linear.weight + low_rank(size) for size in (0.01, 0.1, 1.0)),
        torch.randn(33, 70, dtype=dtype) * linear.weight.std(),
        read.index_fill(0, torch.tensor([3]), 0),
    ):
        other = copy.deepcopy(module)
        other.weight.data = weight
        expected = copy.deepcopy(module)
        expected.forget()
        expected.weight.data = weight
        assert same(other, expected)


@grid(dtype=[torch.bfloat16, torch.float32])  # as weight has them, and before they are rounded
def test_the_very_numbers_of_before_bring_their_codes_back(dtype):
    module = layer("int4")[0].to(torch.bfloat16)
    states = []
    for _ in range(3):
        states.append((copy.deepcopy(module), dequantize_weight(module.quantized_weight, dtype)))
        module.weight.data = torch.randn(33, 70).bfloat16()
    state, numbers = states[1]
    module.weight.data.copy_(numbers)
    assert same(module, state) and len(module._before) == 1


def test_a_write_that_is_refused_changes_nothing():
    module = layer("nf4")[0]
    before = copy.deepcopy(module)
    for weight in (torch.ones(33, 70, dtype=torch.int32), torch.ones(70, 33)):
        with pytest.raises((TypeError, ValueError), match="weight must be"):
            module.weight.data = weight
        assert same(module, before) and not module._before


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


@KINDS
def test_a_call_with_another_weight_gives_the_codes_back(kind):
    module, _, x = layer(kind)
    before = copy.deepcopy(module)
    zeros = {"weight": torch.zeros(33, 70)}
    y = torch.func.functional_call(module, zeros, (x,))
    assert torch.equal(y, module.bias.expand(5, -1)) and same(module, before)


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
