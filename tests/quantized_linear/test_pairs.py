"""quantized_linear of an input that is already quantized: a pair (codes, scale)."""

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted

import fusedops
from fusedops.functional import (
    add_rms_norm,
    quantize_weight,
    quantized_linear,
    rms_norm,
    swiglu,
)
from fusedops.references.quantized_rows import ROW_CODES, quantized_rows_reference
from fusedops.testing import device_of, poisoned
from quantized_linear.cases import (
    CASES,
    FLOATS,
    GEMV_ROWS,
    inputs,
    layer,
    quantized,
    random_weight,
)

FORMATS = ["int8", "fp8"]
SHAPES = [((1, 1), 1), ((7, 33), 15), ((5,), 3), ((2, 3, 64), 48), ((16, 256), 96), ((70, 192), 33)]
SHAPES += [((3, 256), 33), ((17, 2200), 135), ((259, 640), 135), ((1, 4224), 3), ((4, 1152), 130)]


def runs(backend, shape, features, **_):
    """Whether the emulator has a kernel for the rows, and the interpreter is quick enough."""
    if backend == "simt":
        return torch.Size(shape[:-1]).numel() <= GEMV_ROWS
    return backend != "triton" or torch.Size(shape).numel() * features <= 9000


@grid("kind,backend", CASES, "shape,features", SHAPES, dtype=FLOATS, format=FORMATS, only=runs)
def test_same_bits_as_quantizing_the_input(kind, backend, dtype, format, shape, features):
    """input_format makes the same codes from a float32 x."""
    device = device_of(backend)
    weight = quantized(kind, random_weight(features, shape[-1])).to(device)
    x, bias = (t.to(device) for t in inputs(shape, features, torch.float32))
    pair = quantized_rows_reference(x, format)
    for compute in (None, "exact"):
        options = {"activation": "silu", "compute": compute}
        with fusedops.backend(backend), poisoned():
            expected = quantized_linear(x, weight, bias, input_format=format, **options)
            actual = quantized_linear(pair, weight, bias, **options)
            narrow = quantized_linear(pair, weight, bias.to(dtype), **options)
            bare = quantized_linear(pair, weight, out_dtype=dtype, input_format=format)
            wide = quantized_linear(x, weight, input_format=format)
        assert torch.equal(actual, expected) and actual.dtype == torch.float32
        assert narrow.dtype == bare.dtype == dtype and narrow.shape == expected.shape
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(narrow.float(), expected, rtol=4 * eps, atol=4 * eps)
        torch.testing.assert_close(bare.float(), wide, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("kind,backend", [c for c in CASES if c[0].startswith("int")])
def test_integer_products(kind, backend):
    weight = quantized(kind, random_weight(33, 70)).to(device_of(backend))
    x, bias = (t.to(device_of(backend)) for t in inputs((3, 70), 33, torch.float32))
    pair = quantized_rows_reference(x, "int8")
    with fusedops.backend(backend):
        expected = quantized_linear(x, weight, bias, input_format="int8", compute="int8")
        assert torch.equal(quantized_linear(pair, weight, bias, compute="int8"), expected)


@grid("kind,backend", CASES, format=FORMATS)
def test_strided_codes_and_rows_that_are_not_finite(kind, backend, format):
    device = device_of(backend)
    weight = quantized(kind, random_weight(9, 32)).to(device)
    x = inputs((4, 64), 9, torch.float32)[0].to(device)
    x[2, 6] = torch.inf
    x[3] = 0
    codes, scale = quantized_rows_reference(x[:, ::2], format)
    spread = torch.zeros(4, 64, dtype=codes.dtype, device=device)
    spread[:, ::2] = codes
    with fusedops.backend(backend), poisoned():
        actual = quantized_linear((spread[:, ::2], scale), weight)
        plain = quantized_linear((codes, scale), weight)
        expected = quantized_linear(x[:, ::2], weight, input_format=format)
    assert actual[2].isnan().all() and not actual[3].any() and actual[:2].isfinite().all()
    torch.testing.assert_close(actual, plain, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@grid("kind,backend", CASES, format=FORMATS, compute=[None, "exact"])
def test_every_code(kind, backend, format, compute):
    """Also what our operators do not make: -128, NaN, and negative scales. A NaN fills its row."""
    codes = torch.arange(256, dtype=torch.uint8)
    if interpreted(backend) and kind == format == "fp8":  # the interpreter's product has no NaN
        codes[[127, 255]] = 0
    codes = codes.view(ROW_CODES[format]).reshape(4, 64)
    scale = torch.tensor([[1.0], [-0.5], [3.0], [1e-3]])
    weight = quantized(kind, random_weight(9, 64))
    dense = fusedops.functional.dequantize_weight(weight, torch.float64)
    exact, size = codes.double() @ dense.t(), codes.double().abs() @ dense.abs().t()
    device = device_of(backend)
    with fusedops.backend(backend), poisoned():
        pair = codes.to(device), scale.to(device)
        y = quantized_linear(pair, weight.to(device), compute=compute).cpu()
    assert torch.equal(y.isnan(), exact.isnan())
    error = (y / scale - exact).abs().nan_to_num()
    assert (error <= size.nan_to_num() * (1e-6 if compute else 3e-3)).all()


@grid(
    "kind,backend",
    CASES,
    "shape,features",
    [((0, 8), 4), ((3, 0), 4), ((3, 8), 0), ((2, 0, 4), 3)],
    format=FORMATS,
)
def test_empty(kind, backend, format, shape, features):
    weight = quantized(kind, random_weight(features, shape[-1])).to(device_of(backend))
    x, bias = (t.to(device_of(backend)) for t in inputs(shape, features, torch.float32))
    pair = quantized_rows_reference(x, format)
    with fusedops.backend(backend), poisoned():
        y = quantized_linear(pair, weight, bias)
    assert torch.equal(y, bias.expand(y.shape))


@grid(format=FORMATS, dtype=FLOATS)
def test_what_the_other_operators_give(format, dtype):
    x, residual = torch.randn(2, 6, 40, dtype=dtype)
    weight, w = torch.randn(40, dtype=dtype), quantize_weight(random_weight(24, 40), "int8")
    (pair, h), plain = (add_rms_norm(x, residual, weight, output_format=f) for f in (format, None))
    assert torch.equal(h, plain[1])
    calls = {
        "add_rms_norm": (pair, plain[0]),
        "rms_norm": tuple(rms_norm(x, (40,), weight, output_format=f) for f in (format, None)),
        "swiglu": tuple(swiglu(x, residual, output_format=f) for f in (format, None)),
    }
    for codes, floats in calls.values():
        actual = quantized_linear(codes, w, out_dtype=dtype)
        expected = quantized_linear(floats.to(dtype), w, input_format=format)
        assert actual.dtype == dtype
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < {"int8": 0.01, "fp8": 0.03}[format]


@pytest.mark.parametrize("format", FORMATS)
def test_module(format):
    module, _, x = layer("int8", input_format=format)
    module.requires_grad_(False)
    pair = quantized_rows_reference(x, format)
    assert torch.equal(module(pair), module(x))
    plain, _, _ = layer("int8")
    plain.requires_grad_(False).to(torch.bfloat16)
    assert plain(pair).dtype == plain(list(pair)).dtype == torch.bfloat16
    unbiased, _, _ = layer("int8")
    unbiased.bias = None
    unbiased.to(torch.float16)
    assert unbiased(pair).dtype == unbiased(list(pair)).dtype == torch.float16


@pytest.mark.parametrize("format", FORMATS)
def test_autocast(format):
    """The codes stay, and y has autocast's dtype, as a product of floats has."""
    weight = quantized("int8", random_weight(30, 40))
    pair, bias = quantized_rows_reference(torch.randn(6, 40), format), torch.randn(30)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual = quantized_linear(pair, weight, bias)
        double = quantized_linear(pair, weight, out_dtype=torch.float64)
    expected = quantized_linear(pair, weight, bias.bfloat16())
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)
    assert double.dtype == torch.float64


def test_float64():
    weight = quantized("int8", random_weight(30, 40))
    codes, scale = quantized_rows_reference(torch.randn(6, 40), "int8")
    y = quantized_linear((codes, scale), weight, out_dtype=torch.float64)
    dense = fusedops.functional.dequantize_weight(weight, torch.float64)
    torch.testing.assert_close(y, codes.double() * scale.double() @ dense.t())


@pytest.mark.parametrize("format,backend", [("int8", "aot_eager"), ("fp8", "inductor")])
def test_compiles_with_a_norm(format, backend):
    weight = quantized("int8", random_weight(30, 40))
    x, residual = torch.randn(2, 6, 40)

    def run(x, residual):
        pair, h = add_rms_norm(x, residual, output_format=format)
        return quantized_linear(pair, weight, activation="silu"), h

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for a, b in zip(run(x, residual), compiled(x, residual), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("format", FORMATS)
def test_meta_and_jagged(format):
    weight = quantized("int8", random_weight(30, 16))
    parts = [torch.randn(n, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    y = quantized_linear(rms_norm(nested, (16,), output_format=format), weight)
    pair = rms_norm(torch.cat(parts), (16,), output_format=format)
    assert torch.equal(y.values(), quantized_linear(pair, weight))
    on_meta = quantized_linear(tuple(t.to("meta") for t in pair), weight.to("meta"))
    assert on_meta.shape == (8, 30) and on_meta.dtype == torch.float32


def test_gradients_are_refused():
    weight = quantized("int8", random_weight(30, 40))
    codes, scale = quantized_rows_reference(torch.randn(6, 40), "int8")
    bias = torch.zeros(30, requires_grad=True)
    message = "quantized_linear: codes have no gradient, but the scale or the bias requires one"
    with pytest.raises(RuntimeError, match=message):
        quantized_linear((codes, scale), weight, bias)
    with pytest.raises(RuntimeError, match=message):
        quantized_linear((codes, scale.clone().requires_grad_()), weight)
    with torch.no_grad():
        quantized_linear((codes, scale), weight, bias)


def call(codes=None, scale=None, bias=None, kind="int8", **options):
    weight = quantized(kind, random_weight(3, 8))
    codes = torch.zeros(4, 8, dtype=torch.int8) if codes is None else codes
    scale = torch.ones(4, 1) if scale is None else scale
    return quantized_linear((codes, scale), weight, bias, **options)


ERRORS = {
    r"x must be a tensor or a pair \(codes, scale\), got \['Tensor'\]": (
        TypeError,
        lambda: quantized_linear((torch.zeros(4, 8),), quantized("int8", random_weight(3, 8))),
    ),
    r"codes must be int8 or float8_e4m3fn, got uint8 \[4, 8\]": (
        RuntimeError,
        lambda: call(torch.zeros(4, 8, dtype=torch.uint8)),
    ),
    r"codes must have shape \[..., 8\], got int8 \[4, 9\]": (
        RuntimeError,
        lambda: call(torch.zeros(4, 9, dtype=torch.int8)),
    ),
    r"scale must be float32 \[4, 1\], a number for each row of the codes, got float32 \[4\]": (
        RuntimeError,
        lambda: call(scale=torch.ones(4)),
    ),
    r"codes must be on cpu like qweight, got meta": (
        RuntimeError,
        lambda: call(torch.zeros(4, 8, dtype=torch.int8, device="meta")),
    ),
    r"bias must be float32 \[3\] like the output, got float16 \[3\]": (
        RuntimeError,
        lambda: call(bias=torch.zeros(3).half(), out_dtype=torch.float32),
    ),
    r"out_dtype must be float32, float16, bfloat16 or float64, got int8": (
        RuntimeError,
        lambda: call(out_dtype=torch.int8),
    ),
    r"out_dtype must be x's dtype or None unless x is codes, got .*float16": (
        RuntimeError,
        lambda: quantized_linear(
            torch.zeros(4, 8), quantized("int8", random_weight(3, 8)), out_dtype=torch.float16
        ),
    ),
    r"input_format must be None or that of the codes, 'int8', got 'fp8'": (
        ValueError,
        lambda: call(input_format="fp8"),
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    error, run = ERRORS[message]
    with pytest.raises(error, match=f"quantized_linear: {message}"):
        run()
