"""Tests nn.QuantizedLinear: checkpoints, moves, casts, copies and descriptions."""

import copy
import io
import json
import math
import pickle
import re

import pytest
import torch
from axes import grid
from torch import nn

import fusedops
from fusedops.backends import backend, unavailable
from fusedops.extension import _C
from fusedops.functional import quantize_weight, quantized_linear
from fusedops.nn import QuantizedLinear
from fusedops.nn.quantized_linear.codes import bytes_of
from quantized_linear.cases import FORMATS, inputs, layer, same, tensors

KINDS = pytest.mark.parametrize("kind", FORMATS)


@KINDS
def test_it_computes_the_function(kind):
    module, linear, x = layer(kind, activation="gelu", input_format="int8", compute="exact")
    format, options = FORMATS[kind]
    weight = quantize_weight(linear.weight, format, **options)
    kwargs = {"activation": "gelu", "input_format": "int8", "compute": "exact"}
    assert torch.equal(module(x), quantized_linear(x, weight, linear.bias, **kwargs))
    assert isinstance(module, nn.Linear) and module.bias is linear.bias
    assert not QuantizedLinear.from_linear(linear.eval(), format, **options).training


@KINDS
def test_state_dict_round_trips(kind):
    module, linear, x = layer(kind)
    scales = "absmax" if module.format == "nf4" else "scales"
    zeros = ["zeros"] if module.format == "int4" else []
    assert list(module.state_dict()) == ["bias", "qweight", scales, *zeros]
    format, options = FORMATS[kind]
    for state in (module.state_dict(), linear.state_dict()):  # codes, and a float checkpoint
        other = QuantizedLinear(70, 33, format=format, **options)
        assert not same(other, module)
        other.load_state_dict(state, strict=True)
        assert same(other, module) and torch.equal(other(x), module(x))
    assert "weight" in linear.state_dict()  # the caller's dict is as it was
    other.load_state_dict(module.bfloat16().state_dict(), assign=True)
    assert other.dtype == other.weight.dtype == torch.bfloat16


@KINDS
def test_a_float_checkpoint_is_assigned_to_a_layer_on_meta(kind):
    _, linear, x = layer(kind)
    format, options = FORMATS[kind]
    other = QuantizedLinear(70, 33, bias=False, device="meta", format=format, **options)
    state = {"weight": linear.weight.detach().bfloat16()}
    other.load_state_dict(state, assign=True)
    assert other.dtype == torch.bfloat16 and other.qweight.device.type == "cpu"
    expected = quantize_weight(state["weight"], format, **options)
    assert torch.equal(other(x.bfloat16()), quantized_linear(x.bfloat16(), expected))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", [(70, 33), (33, 70, 1), (66, 35)], ids=str)
def test_floats_of_another_shape_are_refused_and_leave_the_codes(kind, shape):
    module = nn.Sequential(layer(kind)[0])
    before = copy.deepcopy(module)
    state = {"0.weight": torch.randn(shape), "0.bias": module[0].bias}
    message = re.escape(f"0.weight must be [33, 70], got {list(shape)}")
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state)
    assert same(module, before)


@KINDS
def test_copies_and_pickles(kind):
    module, _, x = layer(kind)
    at_first, change = copy.deepcopy(module), torch.randn(33, 70) / 20
    module.weight.data += change
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(module), loaded, pickle.loads(pickle.dumps(module))):
        assert same(other, module) and torch.equal(other(x), module(x))
        assert other.qweight.data_ptr() != module.qweight.data_ptr()
        other.weight.data -= change
        assert same(other, at_first)


@KINDS
def test_a_quantized_weight_is_pickled(kind):
    weight = layer(kind)[0].quantized_weight
    other = pickle.loads(pickle.dumps(weight))
    pairs = zip(weight.tensors().values(), other.tensors().values(), strict=True)
    assert all(a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b)) for a, b in pairs)


def test_a_layer_that_an_earlier_version_saved_loads():
    """Codes were pickled as they are, and writes as the codes that they replaced."""
    module, _, x = layer("fp8")
    old = {**module.__dict__, "_before": [module.quantized_weight]}
    loaded = QuantizedLinear.__new__(QuantizedLinear)
    loaded.__setstate__({name: value for name, value in old.items() if name != "transposed"})
    assert same(loaded, module) and torch.equal(loaded(x), module(x)) and not loaded._before


CASTS = {
    "half": lambda m: m.half(),
    "type": lambda m: m.type(torch.bfloat16),
    "double": lambda m: m.to("cpu", torch.float64),
}


@grid(KINDS, cast=CASTS)
def test_casts_leave_codes_and_scales(kind, cast):
    for k, n in ((70, 33), (4, 0), (0, 4)):
        module, _, x = layer(kind, k, n)
        before = {name: t for name, t in tensors(module).items() if name != "bias"}
        dtypes = {name: t.dtype for name, t in module.state_dict().items() if name != "bias"}
        CASTS[cast](module)
        for name, dtype in dtypes.items():
            assert module.state_dict()[name].dtype == dtype
            assert torch.equal(tensors(module)[name], before[name])
        assert module.dtype == module.bias.dtype == module.weight.dtype != torch.float32
        assert module(x.to(module.dtype)).dtype == module.dtype


@KINDS
def test_meta_and_back(kind):
    module, _, x = layer(kind)
    format, options = FORMATS[kind]
    with torch.device("meta"):
        empty = QuantizedLinear(70, 33, format=format, **options)
    assert all(t.is_meta for t in empty.state_dict().values())
    assert empty(x.to("meta")).shape == (5, 33)
    empty.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert torch.equal(empty(x), module(x))
    assert all(t.is_meta for t in module.to("meta").state_dict().values())


def test_a_layer_of_ours_keeps_its_activation():
    linear = fusedops.nn.Linear(8, 8, activation="gelu")
    once = QuantizedLinear.from_linear(linear, "int8")
    twice = QuantizedLinear.from_linear(once, "fp8")
    assert once.activation == twice.activation == "gelu"
    assert QuantizedLinear.from_linear(linear, "int8", activation="silu").activation == "silu"


def test_a_layer_is_made_with_torchs_numbers():
    torch.manual_seed(0)
    plain = nn.Linear(70, 33)
    torch.manual_seed(0)
    module = QuantizedLinear(70, 33, format="int8")
    assert (module.weight - plain.weight).abs().max() <= plain.weight.abs().max() / 250
    assert torch.equal(module.bias, plain.bias)
    assert QuantizedLinear(70, 33, bias=False, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_what_it_is_says_its_repr():
    module, _, _ = layer("int4", activation="silu", compute="bf16")
    assert repr(module) == (
        "QuantizedLinear(in_features=70, out_features=33, bias=True, format='int4', "
        "group_size=64, scale='mse', activation='silu', compute='bf16')"
    )


def test_it_explains_what_runs():
    """Without a kernel the weight is dequantized at each call; explain gives its size."""
    message = QuantizedLinear(1024, 2048, format="nf4", device="meta", compute="bf16").explain(16)
    assert message.startswith("16 rows of float32 by nf4 [2048, 1024] on meta: ATen calls")
    assert "8 MiB" in message and message.endswith("torch multiplies in bfloat16")
    wide = QuantizedLinear(8, 8, dtype=torch.float64, input_format="int8").explain(1)
    assert "ATen calls" in wide and wide.endswith("torch multiplies in float64")
    half = QuantizedLinear(8, 8, device="meta", dtype=torch.float16)
    assert half.explain(1).endswith("torch multiplies in float16")


@pytest.mark.skipif(_C.cpu_isa() == "none", reason="no kernels")
def test_it_explains_which_kernel_runs():
    layers = {
        "registers": QuantizedLinear(256, 64, format="int8", compute="exact"),
        "in place": QuantizedLinear(256, 64, format="int8", input_format="int8"),
        "in a cache": QuantizedLinear(250, 64, format="nf4", compute="exact"),
    }
    if _C.cpu_isa() != "avx512_bf16":  # no products of integers
        del layers["in place"]
    for settings, module in layers.items():
        assert settings in module.explain(4)
    assert "float32 in a cache" in layers["registers"].explain(9)


def test_it_explains_which_kernel_of_a_gpu_runs(monkeypatch):
    """By increasing rows: registers, split depth, tiles, scratch weight."""
    there = {"cuda": None, "triton": None}
    monkeypatch.setattr(f"{QuantizedLinear.__module__}.unavailable", lambda op, name: there[name])
    plain = QuantizedLinear(256, 64, format="nf4", device="meta")
    texts = [plain._plan("cuda", rows) for rows in (1, 4, 5, 64, 65, 1024, 1025)]
    words = ["registers"] * 2 + ["share their depth"] * 2 + ["from 65 rows"] * 2 + ["in memory"]
    assert all(word in text for word, text in zip(words, texts, strict=True))
    assert "multiply bfloat16" in texts[2]
    for words, depth, options in (
        ("multiply int8", 256, {"format": "int8", "input_format": "int8"}),
        # integers would not fit 32 bits
        ("multiply bfloat16", 65537, {"format": "int8", "input_format": "int8"}),
        ("multiply float8_e4m3fn", 256, {"format": "fp8", "input_format": "fp8"}),
        ("multiply float32", 256, {"format": "int8", "compute": "exact"}),
    ):
        assert words in QuantizedLinear(depth, 64, device="meta", **options)._plan("cuda", 100)
    there["cuda"] = "a build without nvcc"
    assert "share their depth" in plain._plan("cuda", 1)
    there["triton"] = "not installed"
    assert plain._plan("cuda", 1) == ""
    there["cuda"] = None
    assert "registers" in plain._plan("cuda", 1) and plain._plan("cuda", 5) == ""


@grid(
    "name,rows,words",
    [
        ("triton", 1, "a Triton kernel"),
        ("simt", 1, "a CUDA C++ kernel"),
        ("simt", 5, "ATen calls"),
        ("cpu", 1, "codes become"),
        ("reference", 1, "ATen calls"),
    ],
)
def test_it_explains_a_forced_backend(name, rows, words):
    if reason := unavailable("quantized_linear", name):
        pytest.skip(reason)
    layer, meta = (QuantizedLinear(256, 64, format="nf4", device=d) for d in ("cpu", "meta"))
    with backend(name):
        text, meta_text = (module.explain(rows) for module in (layer, meta))
    assert f"on cpu, where backend {name!r} is forced: {words}" in text
    assert "forced" not in meta_text
    assert "forced" not in layer.explain(rows)


WRONG = {
    "format must be one of": {"format": "int3"},
    "activation must be one of": {"activation": "tanh"},
    "input_format must be None, 'int8' or 'fp8', got 'int4'": {"input_format": "int4"},
    "compute must be None, .* got 'fast'": {"compute": "fast"},
    "it needs input_format='int8'": {"compute": "int8"},
}


def test_wrong_arguments():
    for message, options in WRONG.items():
        with pytest.raises(ValueError, match=message):
            QuantizedLinear(4, 4, **options)
    with pytest.raises(TypeError, match=r"linear must be a torch.nn.Linear, got Conv1d"):
        QuantizedLinear.from_linear(nn.Conv1d(4, 4, 1), "int8")
    with pytest.raises(TypeError, match="rows must be an int, got float"):
        QuantizedLinear(4, 4).explain(1.5)
    with pytest.raises(ValueError, match="rows must be 0 or more, got -1"):
        QuantizedLinear(4, 4).explain(-1)


def bitsandbytes_state(doubly, blocksize=64):
    """The entries of a Linear4bit as bitsandbytes 0.50 writes them; doubly: quantized absmax."""
    module = layer("nf4", k=128)[0]
    state = module.state_dict()
    described = json.dumps({"blocksize": blocksize, "shape": [*module.weight.shape]}).encode()
    absmax = state["absmax"]
    return module, {
        "bias": state["bias"],
        "weight": state["qweight"],
        "weight.absmax": absmax.to(torch.uint8) if doubly else absmax,
        "weight.quant_map": torch.zeros(16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(described), dtype=torch.uint8),
    }


def test_which_files_of_bitsandbytes_load():
    module, state = bitsandbytes_state(doubly=False)
    other = QuantizedLinear(module.in_features, module.out_features, format="nf4")
    other.load_state_dict(state)
    assert same(module, other)
    words = r"QuantizedLinear: weight must be float weights, .* whose absmax are floats, got other"
    for refused in (bitsandbytes_state(doubly=True), bitsandbytes_state(False, blocksize=128)):
        before = other.qweight.clone(), other.absmax.clone()
        with pytest.raises(RuntimeError, match=words) as raised:
            other.load_state_dict(refused[1])
        assert "Unexpected" not in str(raised.value) and "Missing" not in str(raised.value)
        assert torch.equal(other.qweight, before[0]) and torch.equal(other.absmax, before[1])


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize("format", ["int4", "nf4", "int8"])
def test_gptq_and_awq_are_refused_with_what_loads(kind, format):
    model = nn.Sequential(QuantizedLinear(64, 32, format=format))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    packed = {"gptq": (8, 32), "awq": (64, 4)}[kind]
    state = {
        "0.qweight": torch.zeros(packed, dtype=torch.int32),
        "0.qzeros": torch.zeros(1, 4, dtype=torch.int32),
        "0.scales": torch.ones(1, 32, dtype=torch.float16),
        "0.bias": torch.zeros(32),
    }
    if kind == "gptq":
        state["0.g_idx"] = torch.zeros(64, dtype=torch.int32)
    words = r"QuantizedLinear: 0.qweight must be float weights, .*, got a GPTQ or AWQ checkpoint's"
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items() if n != "0.bias")


@grid(assign=[False, True], value=[math.nan, math.inf], kind=FORMATS)
def test_a_load_warns_of_scales_that_are_not_finite(kind, value, assign):
    module, _, x = layer(kind)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": module})})
    name = "absmax" if "nf4" in kind else "scales"
    state_dict = {key: t.clone() for key, t in model.state_dict().items()}
    scales = state_dict[f"mlp.up_proj.{name}"]
    scales.view(-1)[1] = value
    words = rf"QuantizedLinear: mlp.up_proj.{name} has 1 of {scales.numel()} scales that are NaN"
    with pytest.warns(UserWarning, match=words):
        model.load_state_dict(state_dict, assign=assign)
    assert not module(x).isfinite().all()
    with pytest.warns(UserWarning, match=rf"QuantizedLinear: {name} has 1 of"):
        module.load_state_dict(module.state_dict())
    module.path = "model.up_proj"
    with pytest.warns(UserWarning, match=rf"QuantizedLinear: model.up_proj.{name} has 1 of"):
        module.load_state_dict(module.state_dict())


@pytest.mark.filterwarnings("error")
def test_a_load_of_finite_scales_or_of_none_warns_of_nothing():
    module, linear, _ = layer("int4")
    module.load_state_dict(module.state_dict())
    module.load_state_dict(linear.state_dict())
    module.load_state_dict({"bias": module.bias}, strict=False)
    meta = QuantizedLinear(70, 33, format="int4", device="meta")
    meta.load_state_dict(meta.state_dict())


def test_rows_of_inputs():
    """Kernels for other numbers of rows round the same operands."""
    x, _ = inputs((2, 5, 70), 33, torch.float32)
    module, _, _ = layer("int8")
    torch.testing.assert_close(module(x)[1], module(x[1]))
