"""quantize_weight and dequantize_weight use the specified bytes of each format."""

import importlib
import math
from functools import partial

import pytest
import torch
from contract.fuzzing import FLOATS, SIZES, drawn
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from fusedops.functional import dequantize_weight, quantize_weight, quantized_linear
from fusedops.testing import threads
from quantized_linear.cases import FORMATS, quantized, random_weight

family = importlib.import_module("fusedops.functional.quantized_linear")
references = importlib.import_module("fusedops.references.quantized_linear")
KINDS = pytest.mark.parametrize("kind", FORMATS)

# The largest relative error of a normal weight, 1.02 times what was measured.
ERRORS = {
    "int8": 0.0085,
    "int8 in groups": 0.0060,
    "int4": 0.0890,
    "int4 in groups of 32": 0.0800,
    "nf4": 0.0939,
    "nf4 by mse": 0.0870,
    "fp8": 0.0271,
}


def bytes_of(q):
    return [t.contiguous().view(torch.uint8) for t in q.tensors().values()]


def quantized_by_reference(kind, weight):
    format, options = FORMATS[kind]
    size, scale = family.check_format(
        format, weight.shape[1], options.get("group_size"), options.get("scale")
    )
    tensors = references.quantize_weight_reference(weight, format, size, scale)
    return family.QuantizedWeight(format, *weight.shape, size, *tensors)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(bytes_of(a), bytes_of(b), strict=True))


@KINDS
def test_error_of_a_normal_weight(kind):
    weight = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)) * 0.02
    error = dequantize_weight(quantized(kind, weight)) - weight
    assert error.norm() <= ERRORS[kind] * weight.norm()


@KINDS
def test_shapes_and_dtypes(kind):
    for n, k in ((15, 33), (1, 1), (64, 128), (3, 0), (0, 3), (0, 0)):
        q = quantized(kind, torch.randn(n, k))
        groups = -(-k // q.group_size)
        bytes_a_row = -(-k // 2)
        expected = {
            "int8": {"qweight": (n, k), "scales": (n, groups)},
            "int4": {"qweight": (n, bytes_a_row), "scales": (n, groups), "zeros": (n, groups)},
            "nf4": {"qweight": (-(-n * k // 2), 1), "absmax": (-(-n * k // 64),)},
            "fp8": {"qweight": (n, k), "scales": (n, groups)},
        }[q.format]
        assert {name: tuple(t.shape) for name, t in q.tensors().items()} == expected
        assert all(t.is_contiguous() for t in q.tensors().values())
        assert q.scales.dtype == torch.float32 and q.shape == (n, k)
        assert dequantize_weight(q).shape == (n, k)


def test_bytes_of_int8():
    q = quantize_weight(torch.tensor([[1.27, -0.635, 0.004], [0.0, 0.0, 0.0]]), "int8")
    assert q.qweight.tolist() == [[127, -64, 0], [0, 0, 0]]
    torch.testing.assert_close(q.scales, torch.tensor([[0.01], [0.0]]))


def test_bytes_of_int4():
    """From -5 to 10: a step is 1, 0 is code 5, which a half byte that is left has as well, and the
    first code is the high half.
    """
    weight = torch.tensor([[-5.0, 10, 0, 3, -4]])
    q = quantize_weight(weight, "int4", group_size=32, scale="absmax")
    assert q.qweight.tolist() == [[0x0F, 0x58, 0x15]]
    assert q.zeros.tolist() == [[5]] and q.scales.tolist() == [[1]]
    assert torch.equal(dequantize_weight(q), weight)


def test_bytes_of_nf4():
    """Blocks continue from row to row; an unused half byte has the code of 0."""
    weight = torch.tensor([[1.0, 0, -1], [0.5, -0.1, 0.25], [2, 0, 0]])
    q = quantize_weight(weight, "nf4")
    assert q.qweight.flatten().tolist() == [0xC7, 0x2A, 0x69, 0xF7, 0x77]
    assert q.scales.tolist() == [2]


def test_bytes_of_fp8():
    q = quantize_weight(torch.tensor([[448.0, -1.0625, 0.0]]), "fp8")
    assert q.qweight.float().tolist() == [[448, -1, 0]] and q.scales.tolist() == [[1]]


@pytest.mark.parametrize("kind", [k for k in FORMATS if not k.startswith("int4")])
def test_every_weight_has_the_nearest_code(kind):
    weight = random_weight(20, 128)
    q = quantized(kind, weight)
    codes = {
        "int8": torch.arange(-127.0, 128),
        "nf4": torch.tensor(references.NF4),
        "fp8": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float(),
    }[q.format]
    codes = codes[codes.isfinite()]
    scales = q.scales.reshape(20, -1).repeat_interleave(q.group_size, 1)[:, :128]
    nearest = (codes * scales[..., None] - weight[..., None]).abs().amin(-1)
    error = (dequantize_weight(q) - weight).abs()
    assert (error <= nearest * 1.0001 + 1e-7 * scales).all()


@pytest.mark.parametrize("format", ["int4", "nf4"])
def test_mse_is_no_worse_in_any_group(format):
    weight = torch.randn(64, 640) ** 3
    by = {
        scale: dequantize_weight(quantize_weight(weight, format, scale=scale))
        for scale in ("absmax", "mse")
    }
    errors = {k: (w - weight).view(-1, 64).square().sum(-1) for k, w in by.items()}
    assert errors["mse"].sum() < 0.97 * errors["absmax"].sum()
    assert (errors["mse"] <= 1.0001 * errors["absmax"]).all()


@KINDS
def test_layout_and_pieces_change_no_byte(kind, monkeypatch):
    weight = random_weight(48, 384)
    assert same(quantized(kind, weight.t().contiguous().t()), quantized(kind, weight))
    weight = weight[:, :200]  # the last group is a part of one
    expected = quantized(kind, weight.contiguous())
    assert same(quantized(kind, weight), expected)
    assert same(quantized(kind, torch.cat([weight, weight], 1)[:, :200]), expected)
    assert same(quantized(kind, torch.nn.Parameter(weight)), expected)
    monkeypatch.setattr(references, "ELEMENTS_AT_ONCE", 700)
    assert same(quantized_by_reference(kind, weight), expected)


@KINDS
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 200), (300, 131), (0, 5), (5, 0)], ids=str)
def test_kernels_make_the_bytes_of_the_reference(kind, shape):
    """Past a vector of groups, with every kind of number in them; on CPUs and on a GPU."""
    weight = random_weight(*shape) ** 3
    if weight.numel() > 2000:
        weight[1] = 0
        weight[2] *= 1e-38
        weight[3, 5], weight[4, 100], weight[5, 9] = math.nan, math.inf, -math.inf
        weight[6], weight[7] = weight[6].abs(), -weight[7].abs()
        weight[8], weight[9] = 0.5, torch.arange(shape[1]) / 8
    expected = quantized_by_reference(kind, weight)
    assert same(quantized(kind, weight), expected)
    if torch.cuda.is_available():
        assert same(quantized(kind, weight.cuda()).to("cpu"), expected)


@KINDS
def test_threads_make_the_same_bytes_and_numbers(kind):
    weight = random_weight(301, 520)
    expected = quantized_by_reference(kind, weight)
    with threads(3):
        actual = quantized(kind, weight)
        numbers = [dequantize_weight(actual, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert same(actual, expected)
    assert all(torch.equal(a, dequantize_weight(actual, a.dtype)) for a in numbers)


def test_kernels_make_the_bytes_of_zeros_between_two():
    """Each share rounds such a zero its own way: the zero is that of the share that is taken."""
    size = torch.arange(1, 257)[:, None] / 37
    weight = size * (torch.rand(256, 64, generator=torch.Generator().manual_seed(3)) * 15 - 5.5)
    weight[:, :1], weight[:, 1:2] = -5.5 * size, 9.5 * size
    assert same(quantized("int4", weight), quantized_by_reference("int4", weight))


@KINDS
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-39])
def test_groups_of_zeros_and_of_tiny_numbers(kind, size):
    weight = random_weight(6, 128)
    weight[2], weight[4, :64] = 0, size
    dequantized = dequantize_weight(quantized(kind, weight))
    assert torch.equal(dequantized[2], torch.zeros(128))
    assert dequantized.isfinite().all() and dequantized[4, :64].abs().max() <= size + 1e-38


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_group_nan(kind, bad):
    weight = random_weight(6, 192)
    clean = dequantize_weight(quantized(kind, weight))
    weight[2, 70] = bad
    q = quantized(kind, weight)
    dequantized = dequantize_weight(q)
    size = min(q.group_size, 192)
    first = 70 // size * size
    group = torch.zeros(6, 192, dtype=torch.bool)
    group[2, first : first + size] = True
    assert dequantized[group].isnan().all()
    assert torch.equal(dequantized[~group], clean[~group])


@KINDS
def test_on_meta(kind):
    q = quantized(kind, torch.empty(15, 133, device="meta"))
    real = quantized(kind, torch.randn(15, 133))
    for a, b in zip(q.tensors().values(), real.tensors().values(), strict=True):
        assert a.is_meta and (a.shape, a.dtype) == (b.shape, b.dtype)
    assert dequantize_weight(q, torch.bfloat16).shape == (15, 133)


@pytest.mark.parametrize("shape", [(64, 64), (512, 1000), (3, 43), (7, 64), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nf4_is_that_of_bitsandbytes(shape, dtype):
    theirs = pytest.importorskip("bitsandbytes.functional")
    weight = random_weight(*shape).to(dtype)
    if weight.numel() > 128:
        weight.view(-1)[64:128] = 0
    packed, state = theirs.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    q = quantize_weight(weight, "nf4")
    assert torch.equal(packed, q.qweight) and torch.equal(state.absmax, q.scales)
    assert torch.equal(theirs.dequantize_4bit(packed, state), dequantize_weight(q, dtype))
    state.absmax = quantize_weight(weight, "nf4", scale="mse").scales
    assert theirs.dequantize_4bit(packed, state).shape == shape


def empty_weight(format, n, k, group_size):
    """A weight's tensors on meta, as Python's table of formats describes them."""
    numbers = n * k if format.flat else k
    codes, groups = -(-numbers * format.bits // 8), -(-numbers // group_size)
    qweight = torch.empty(
        (codes, 1) if format.flat else (n, codes), dtype=format.dtype, device="meta"
    )
    scales = torch.empty(groups if format.flat else (n, groups), device="meta")
    return qweight, scales, scales.to(torch.uint8) if format.has_zeros else None


@pytest.mark.parametrize("name", references.FORMATS)
def test_both_tables_of_formats_agree(name):
    """C++ takes the tensors that Python's table describes, and refuses those of other formats."""
    run = torch.ops.fusedops.quantized_linear
    n, k = 5, 130
    x = torch.empty(2, k, device="meta")
    for other, format in references.FORMATS.items():
        layout = name, n, k, format.group_size or 64
        weight = empty_weight(format, n, k, layout[-1])
        if other != name:
            with pytest.raises(RuntimeError, match="must be"):
                run(x, *weight, None, *layout)
            continue
        assert run(x, *weight, None, *layout).shape == (2, n)
        integers = partial(run, x, *weight, None, *layout, input_format="int8", compute="int8")
        if format.integers:
            integers()
        else:
            with pytest.raises(ValueError, match="a weight of integers"):
                integers()
        if format.flat:
            with pytest.raises(RuntimeError, match=f"group_size of {name} must be 64, got 32"):
                run(x, *weight, None, name, n, k, 32)


@pytest.mark.parametrize("name", references.FORMATS)
def test_bytes_per_element(name):
    q = quantize_weight(torch.zeros(64, 4096), name)
    stored = sum(t.nbytes for t in q.tensors().values()) / (64 * 4096)
    assert stored == pytest.approx(references.FORMATS[name].bytes_per_element(), abs=0.001)


WRONG = [
    (
        (torch.zeros(3), "int8"),
        {},
        TypeError,
        r"floating-point matrix \[N, K\], got torch.float32 \[3\]",
    ),
    ((torch.zeros(3, 3).int(), "int8"), {}, TypeError, "got torch.int32"),
    (([[1.0]], "int8"), {}, TypeError, "got <class 'list'>"),
    ((torch.zeros(3, 3), "int2"), {}, ValueError, "format must be one of .* got 'int2'"),
    ((torch.zeros(3, 3), "int4"), {"group_size": 48}, ValueError, "32, 64 or 128, got 48"),
    ((torch.zeros(3, 3), "int8"), {"group_size": 0}, ValueError, "1 or more, got 0"),
    ((torch.zeros(3, 3), "int8"), {"group_size": "8"}, TypeError, "an int or None, got str"),
    ((torch.zeros(3, 3), "nf4"), {"group_size": 32}, ValueError, "None or 64, got 32"),
    ((torch.zeros(3, 3), "fp8"), {"scale": "mse"}, ValueError, "must be 'absmax', got 'mse'"),
]


@pytest.mark.parametrize("args,options,error,message", WRONG, ids=[m for *_, m in WRONG])
def test_errors_say_what_was_wanted(args, options, error, message):
    with pytest.raises(error, match=message):
        quantize_weight(*args, **options)


def test_a_sharded_weight_is_refused():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(TypeError, match=r"weight must be a full tensor, got a DTensor"):
            quantize_weight(DTensor.from_local(torch.zeros(4, 4), mesh), "int8")
    finally:
        torch.distributed.destroy_process_group()


def test_a_plain_tensor_is_no_quantized_weight():
    w = torch.zeros(3, 3)
    for call in (lambda: quantized_linear(w, w), lambda: dequantize_weight(w)):
        with pytest.raises(TypeError, match=r"qweight must be a QuantizedWeight.*got Tensor"):
            call()


@given(data=st.data())
def test_a_weight_has_the_bytes_of_its_reference(data):
    """For any layout and values."""
    n, k = (data.draw(st.integers(0, 9) | st.sampled_from(SIZES[:12])) for _ in range(2))
    weight = data.draw(drawn((n, k), data.draw(st.sampled_from(FLOATS)))).tensor()
    format, options = FORMATS[data.draw(st.sampled_from(list(FORMATS)))]
    q = quantize_weight(weight, format, **options)
    expected = references.quantize_weight_reference(
        weight, format, q.group_size, options.get("scale", "mse" if format == "int4" else "absmax")
    )
    for actual, tensor in zip((q.qweight, q.scales, q.zeros), expected, strict=True):
        assert (actual is None) == (tensor is None)
        if tensor is not None:
            assert torch.equal(actual.view(torch.uint8), tensor.view(torch.uint8))
    dense = dequantize_weight(q)
    layout = q.format, q.out_features, q.in_features, q.group_size
    by_hand = family.dequantize_weight_reference(*expected, *layout, torch.float32)
    assert torch.equal(dense.nan_to_num(7), by_hand.nan_to_num(7))
