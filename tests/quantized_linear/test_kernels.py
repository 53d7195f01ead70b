"""quantized_linear and dequantize_weight match their references on every backend."""

import ctypes
import dataclasses
import mmap
from itertools import product

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted
from contract.wrapped import viewed
from linear.cases import LAYOUTS

import fusedops
from fusedops.functional import (
    QuantizedWeight,
    dequantize_weight,
    quantize_weight,
    quantized_linear,
)
from fusedops.references.linear import ACTIVATIONS
from fusedops.references.quantized_linear import dequantize_weight_reference
from fusedops.references.quantized_rows import rounded_rows
from fusedops.testing import check, device_of, gradients, placed, poisoned, threads
from quantized_linear.cases import (
    BACKENDS,
    CASES,
    FLOATS,
    FORMATS,
    PRECISIONS,
    compare,
    functions,
    inputs,
    quantized,
    random_weight,
    runs,
)

# x, features. One element; odd; a vector; primes past a group, a block and a byte; several groups;
# a few rows; rows past a block, of columns past a block and of more depth than a piece; codes that
# are multiplied in place, of more depth than a piece; a depth, and columns, that GPUs split;
# more rows than a GPU's first ways have.
SHAPES = [
    ((1, 1), 1),
    ((7, 33), 15),
    ((5,), 3),
    ((2, 3, 64), 48),
    ((1, 131), 67),
    ((16, 256), 96),
    ((70, 192), 33),
    ((1, 384), 130),
    ((3, 256), 33),
    ((4, 128), 7),
    ((2, 2200), 9),
    ((17, 2200), 135),
    ((259, 1099), 135),
    ((5, 2112), 12),
    ((3, 1100), 7),
    ((3, 6), 1100),
    ((2, 128), 6),
    ((4, 192), 5),
    ((1, 4224), 3),
    ((1, 8192), 18),
    ((17, 66), 7),
    ((70, 64), 5),
]


@grid("kind,backend", CASES, "shape,features", SHAPES, dtype=FLOATS, only=runs)
def test_forward_and_gradients(kind, backend, dtype, shape, features):
    weight = quantized(kind, random_weight(features, shape[-1]))
    for input_format, compute in PRECISIONS:
        args = inputs(shape, features, dtype)
        compare(weight, backend, args, input_format=input_format, compute=compute)


@grid(
    "kind,backend",
    [c for c in CASES if c[0].startswith("int")],
    "shape,features",
    SHAPES,
    dtype=FLOATS,
    only=runs,
)
def test_integer_products(kind, backend, dtype, shape, features):
    weight = quantized(kind, random_weight(features, shape[-1]))
    args = inputs(shape, features, dtype)
    compare(weight, backend, args, input_format="int8", compute="int8")


# A matrix unit multiplies tiles of 16 rows, up to 6 at once, in pieces of the depth of 512. Blocks
# of 128 codes of 4 bits are decoded at once if the depth and the groups allow it.
@pytest.mark.parametrize("format,group_size", [*product(["int4"], [32, 64, 128]), ("nf4", None)])
@pytest.mark.parametrize("rows,depth", [(2, 1152), (17, 512), (40, 1280), (100, 640), (230, 1100)])
def test_tiles_of_4_bit_codes(format, group_size, rows, depth):
    weight = quantize_weight(random_weight(37, depth), format, group_size=group_size)
    for dtype in FLOATS:
        compare(weight, "cpu", inputs((rows, depth), 37, dtype))


@pytest.mark.parametrize("format,group_size", [("int8", None), ("int8", 48), ("fp8", None)])
@pytest.mark.parametrize("rows,depth", [(1, 600), (2, 1152), (33, 1033), (100, 640)])
def test_tiles_of_8_bit_codes(format, group_size, rows, depth):
    weight = quantize_weight(random_weight(37, depth), format, group_size=group_size)
    for dtype in FLOATS:
        compare(weight, "cpu", inputs((rows, depth), 37, dtype))


# Up to 8 rows are multiplied in registers; above that, blocks of 4 rows, with a rest of 1 to 3.
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("depth", [256, 1153])
def test_every_count_of_few_rows(kind, depth):
    weight = quantized(kind, random_weight(37, depth))
    for rows in (*range(2, 14), 31, 33, 65):
        compare(weight, "cpu", inputs((rows, depth), 37, torch.bfloat16))


@grid("kind,backend", CASES, activation=ACTIVATIONS, dtype=FLOATS)
def test_activations_and_no_bias(kind, backend, activation, dtype):
    weight = quantized(kind, random_weight(35, 80))
    for rows, bias in ((9, True), (9, False), (3, True)):
        compare(weight, backend, inputs((rows, 80), 35, dtype, bias), activation=activation)


@grid("kind,backend", CASES, layout=LAYOUTS, dtype=[torch.float32, torch.bfloat16])
def test_strides(kind, backend, layout, dtype):
    weight = quantized(kind, random_weight(37, 69))
    for rows in (20, 2):
        x = LAYOUTS[layout](lambda *shape: torch.randn(shape, dtype=dtype), rows, 69)
        bias = torch.randn(74, dtype=dtype)[::2]
        compare(weight, backend, (x, bias), activation="silu")


@pytest.mark.parametrize("kind,backend", CASES)
def test_strided_output_gradients(kind, backend):
    args = inputs((12, 64), 40, torch.float32)
    for after in (torch.t, lambda y: y.sum(0), lambda y: y.sum(-1), lambda y: y[:, 3:30]):
        both = functions(quantized(kind, random_weight(40, 64)), activation="gelu")
        check(*(viewed(run, after) for run in both), args, backend)


EMPTY = [((0, 8), 4), ((3, 0), 4), ((3, 0), 129), ((3, 8), 0), ((2, 0, 4), 3)]


@grid("kind,backend", CASES, "shape,features", EMPTY, "input_format,compute", PRECISIONS)
def test_empty(kind, backend, shape, features, input_format, compute):
    weight = quantized(kind, random_weight(features, shape[-1]))
    run, reference = functions(weight, input_format=input_format, compute=compute)
    args = placed(inputs(shape, features, torch.float32), device_of(backend))
    with fusedops.backend(backend), poisoned():
        actual = gradients(run, args)
    torch.testing.assert_close(actual, gradients(reference, args))


@grid("kind,backend", CASES, bad=[float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(kind, backend, bad):
    depths = (70,) if interpreted(backend) else (70, 256)
    for k in depths:  # of 256 a few rows take 4 bits straight from registers, on a CPU
        weight = quantized(kind, random_weight(33, k))
        for rows, (input_format, compute) in product((20, 3), PRECISIONS):
            args = inputs((rows, k), 33, torch.float32)
            args[0][2, 5] = bad
            compare(weight, backend, args, input_format=input_format, compute=compute)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.startswith("int4")])
def test_sums_that_fit_though_those_of_codes_do_not(kind):
    """15 times x is past float32's range; times a code less its zero and a scale it is not."""
    x = torch.zeros(2, 128)
    x[:, :8] = 5e37
    compare(quantized(kind, random_weight(5, 128)), "cpu", (x, torch.zeros(5)))


@grid(
    "kind,backend",
    CASES,
    dtype=[torch.float32],
    shape=[(rows, 1100) for rows in (3, 20, 40)],
    features=[40],
    only=runs,
)
def test_a_weight_that_is_nan_stays_in_its_column(kind, backend, dtype, shape, features):
    """Of more depth than a piece, so that what a scratch held before lies behind the last one."""
    weight = random_weight(features, 1100)
    weight[[0, 1, 32, 33]] = float("nan")  # of the first columns at once, and of the last
    args = inputs(shape, features, dtype)
    for compute in (None, "exact"):
        compare(quantized(kind, weight), backend, args, compute=compute)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("k,features", [(70, 33), (256, 48), (128, 5), (2200, 40)])
def test_cpus_read_nothing_past_the_end_of_a_weight(kind, k, features):
    """The tensors end at the end of mapped memory: reading one more byte would crash."""
    weight = quantized(kind, random_weight(features, k))
    moved = {name: at_the_end_of_memory(t) for name, t in weight.tensors().items()}
    moved = {"scales" if name == "absmax" else name: t for name, t in moved.items()}
    ending = dataclasses.replace(weight, **moved)
    for rows, (input_format, compute) in product((1, 4, 20, 40), PRECISIONS):
        x = inputs((rows, k), features, torch.float32)[0].requires_grad_()
        kwargs = {"input_format": input_format, "compute": compute}
        y = quantized_linear(x, ending, **kwargs)
        y.sum().backward()
        assert torch.equal(y, quantized_linear(x, weight, **kwargs))


def at_the_end_of_memory(t):
    """Returns equal numbers in memory before a page that may not be read."""
    size = -(-t.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    held = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(held))
    closed = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0)
    assert closed == 0
    moved = torch.frombuffer(held, dtype=torch.uint8, count=t.nbytes, offset=size - t.nbytes)
    return moved.copy_(t.view(-1).view(torch.uint8)).view(t.dtype).view(t.shape)


@grid(backend=BACKENDS, input_format=["int8", "fp8"], rows=[4, 20, 40])
def test_inputs_have_the_codes_of_the_reference(backend, input_format, rows):
    """A weight of ones in its diagonal gives them back, times a row's step: halves go to even, and
    of fp8 what lies below its normal numbers."""
    k = 96
    weight = QuantizedWeight("int8", k, k, k, torch.eye(k, dtype=torch.int8), torch.ones(k, 1))
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(5)) ** 3
    x[1] = torch.arange(k) + 0.5
    x[1, 0], x[2, 0] = 127, 448
    x[2, 1:] = 2.0 ** -torch.arange(k - 1).div(6).floor() * (1 + torch.arange(k - 1) % 6 / 16)
    x[3], x[3, 7] = 1e-39, 0
    device = device_of(backend)
    with fusedops.backend(backend):
        actual = quantized_linear(
            x.to(device), weight.to(device), input_format=input_format, compute="exact"
        )
    torch.testing.assert_close(actual.cpu(), rounded_rows(x, input_format), rtol=0, atol=0)


@grid(backend=BACKENDS, rows=[1, 5], compute=[None, "exact"], at=[5, 32])
def test_every_code_of_fp8(backend, rows, compute, at):
    """One column per code, in the first 32 of its row and after them; two of the codes are NaN."""
    codes = torch.zeros(256, 33, dtype=torch.uint8)
    codes[:, at] = torch.arange(256)
    codes = codes.view(torch.float8_e4m3fn)
    q = QuantizedWeight("fp8", 256, 33, 33, codes, torch.ones(256, 1)).to(device_of(backend))
    x = torch.ones(rows, 33, device=device_of(backend))
    with fusedops.backend(backend):
        y = quantized_linear(x, q, compute=compute)
    expected = codes[:, at].float().expand(rows, -1)
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros_and_of_tiny_numbers_have_codes_of_zero(backend):
    weight = quantized("int8", random_weight(9, 40))
    x, bias = inputs((4, 40), 9, torch.float32)
    x[1], x[2] = 0, 1e-40
    compare(weight, backend, (x, bias), input_format="int8", compute="int8")


@grid("kind,backend", CASES, dtype=[*FLOATS, torch.float64])
def test_dequantized_weight(kind, backend, dtype):
    for features, depth in ((15, 33), (48, 64), (67, 131), (1, 1), (5, 0), (0, 5)):
        q = quantized(kind, random_weight(features, depth)).to(device_of(backend))
        sizes = q.format, q.out_features, q.in_features, q.group_size
        expected = dequantize_weight_reference(q.qweight, q.scales, q.zeros, *sizes, dtype)
        with fusedops.backend(backend), poisoned():
            assert torch.equal(dequantize_weight(q, dtype), expected)


def runs_in_time(backend, rows, **_):
    return not interpreted(backend) or rows <= 40


@grid("kind,backend", CASES, rows=[1, 40, 150], only=runs_in_time)
def test_same_bits_each_time_and_whatever_the_threads(kind, backend, rows):
    features, depth = (30, 520) if interpreted(backend) else (300, 520)
    run, _ = functions(quantized(kind, random_weight(features, depth)), activation="gelu")
    args = placed(inputs((rows, depth), features, torch.float32), device_of(backend))
    with fusedops.backend(backend), threads(1):
        first, again = gradients(run, args), gradients(run, args)
        with threads(3):
            threaded = gradients(run, args)
    for key, value in first.items():
        assert torch.equal(value, again[key])
        if backend == "cpu":
            assert torch.equal(value, threaded[key])
        else:  # torch's products
            torch.testing.assert_close(value, threaded[key])


@grid(
    "kind,backend",
    CASES,
    dtype=[torch.float32],
    shape=[(1, 4224), (1, 8192)],
    features=[3],
    only=runs,
)
def test_a_depth_of_many_vectors(kind, backend, dtype, shape, features):
    """GPUs split it among blocks whose threads take whole vectors."""
    weight = quantized(kind, random_weight(features, shape[-1]))
    compare(weight, backend, inputs(shape, features, dtype), compute="exact")


ERRORS = [
    ({"x": torch.zeros(3, 9)}, RuntimeError, r"x must have shape \[..., 8\].*\[3, 9\]"),
    ({"x": torch.zeros(3, 8).int()}, RuntimeError, "x must be float32.*int32"),
    ({"bias": torch.zeros(5)}, RuntimeError, r"bias must have shape \[4\]"),
    ({"bias": torch.zeros(4).half()}, RuntimeError, "bias must be float32.*float16"),
    ({"activation": "tanh"}, ValueError, "activation must be .* got 'tanh'"),
    ({"input_format": "int4"}, ValueError, "input_format must be .* got 'int4'"),
    ({"compute": "fp16"}, ValueError, "compute must be .* got 'fp16'"),
    ({"compute": "int8"}, ValueError, "needs input_format='int8'"),
    ({"kind": "nf4", "input_format": "int8", "compute": "int8"}, ValueError, "needs .* integers"),
    ({"group_size": 3}, RuntimeError, r"group_size of int4 must be even, .* got 3"),
]


@pytest.mark.parametrize("changed,error,message", ERRORS, ids=lambda e: str(e)[:20])
def test_errors_say_what_was_wanted(changed, error, message):
    kwargs = {"x": torch.zeros(3, 8), "bias": None, "kind": "int8", "group_size": None, **changed}
    kind, size = kwargs.pop("kind"), kwargs.pop("group_size")
    weight = quantized("int4" if size else kind, random_weight(4, 8))
    weight = dataclasses.replace(weight, group_size=size) if size else weight
    with pytest.raises(error, match=message):
        quantized_linear(kwargs.pop("x"), weight, kwargs.pop("bias"), **kwargs)


@pytest.mark.parametrize("rows", [1, 4, 8, 9, 40])
def test_sums_of_codes_may_exceed_float32(rows):
    """nf4's numbers are up to 250 times the weight's here, and scaled sums are finite."""
    weight = torch.full((130, 128), 0.004)
    weight[:, ::2] = 0.0037
    x = torch.full((rows, 128), 1e38)
    for kind in ("nf4", "int4"):
        held = quantize_weight(weight, kind)
        expected = x.double() @ dequantize_weight(held).double().T
        torch.testing.assert_close(quantized_linear(x, held).double(), expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("rows", [1, 40])
def test_a_bias_that_is_copied_when_written(rows):
    """It is only read, so torch must not be asked for a copy, which no thread could make."""
    x, bias = torch.randn(rows, 512), torch.randn(2048)
    for kind in ("int8", "nf4"):
        held = quantize_weight(torch.randn(2048, 512), kind)
        expected = quantized_linear(x, held, bias.clone())
        assert torch.equal(quantized_linear(x, held, torch._lazy_clone(bias)), expected)
