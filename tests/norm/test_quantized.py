"""rms_norm and add_rms_norm with `output_format` return quantized rows, each with its scale."""

import pytest
import torch
from axes import grid
from contract.quantized_rows import FORMATS, check_rows, dequantized, run_on, wide

import fusedops
from fusedops.functional import add_rms_norm, quantize_weight, rms_norm
from fusedops.references import norm
from fusedops.testing import device_of, placed, poisoned, threads
from norm.cases import BACKENDS as ALL
from norm.cases import FLOATS, inputs

OPS = {
    "rms_norm": (rms_norm, norm.rms_norm_reference),
    "add_rms_norm": (add_rms_norm, norm.add_rms_norm_reference),
}
BACKENDS = [name for name in ALL if name != "triton"]  # there it is ATen calls
CASES = [(op, name) for op in OPS for name in BACKENDS]
SHAPES = [(1, 1), (7, 33), (2, 3, 1024), (3, 4099), (130, 5), (1, 70001), (40,)]


def exact_rows(op, args, rounding="torch", offset=0.0, p=0.0, **_):
    """y in float64, with llama's rounding of the normalised row in its dtype; and h."""
    x, other, weight, eps = args
    h = other + norm.dropout_reference(x, p) if "add" in op else x
    dtype = norm._stream_dtype(x, h, weight) if "add" in op else x.dtype
    n = h.double() * (h.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    n = n.to(dtype).double() if rounding == "llama" else n
    return n if weight is None else n * (offset + weight.double())


def compare(op, backend, args, format, **options):
    function, reference = OPS[op]
    options.setdefault("rounding", "torch")
    args = placed(args, device_of(backend))
    actual = run_on(backend, function, args, output_format=format, **options)
    eager = reference(*args, output_format=format, **options)
    if "add" in op:
        (actual, h), (eager, expected_h) = actual, eager
        assert torch.equal(h, expected_h) and h.dtype == expected_h.dtype
        assert h.is_contiguous()
    check_rows(actual, eager, exact_rows(op, args, **options), format)


@grid("op,backend", CASES, dtype=FLOATS, format=FORMATS, shape=SHAPES)
def test_codes(op, backend, dtype, format, shape):
    compare(op, backend, inputs(op, shape, dtype), format)


@grid(
    "op,backend",
    CASES,
    dtype=FLOATS,
    format=FORMATS,
    weight_dtype=FLOATS,
    rounding=["torch", "llama"],
    offset=[0.0, 1.0],
)
def test_roundings(op, backend, dtype, format, weight_dtype, rounding, offset):
    args = inputs(op, (9, 200), dtype, weight_dtype)
    compare(op, backend, args, format, rounding=rounding, offset=offset)
    compare(op, backend, (*args[:2], None, 1e-6), format, rounding=rounding)


@grid(
    backend=BACKENDS,
    dtype=FLOATS,
    residual_dtype=FLOATS,
    format=FORMATS,
    weight_dtype=[torch.float32, torch.bfloat16],
)
def test_residual_in_another_dtype(backend, dtype, residual_dtype, format, weight_dtype):
    args = inputs("add_rms_norm", (6, 90), dtype, weight_dtype, residual_dtype)
    compare("add_rms_norm", backend, args, format, rounding="llama")


@grid("op,backend", CASES, format=FORMATS)
def test_codes_are_those_of_the_plain_result(op, backend, format):
    """Bit for bit where y is float32: then its last rounding is none."""
    function, _ = OPS[op]
    for dtype in (torch.float32, torch.bfloat16):
        args = placed(inputs(op, (50, 1000), dtype, torch.float32), device_of(backend))
        with fusedops.backend(backend):
            y = function(*args, rounding="llama")
            pair = function(*args, rounding="llama", output_format=format)
        y, (codes, scale) = (y[0], pair[0]) if "add" in op else (y, pair)
        assert y.dtype == torch.float32
        plain = quantize_weight(y, format)
        assert torch.equal(codes.view(torch.uint8), plain.qweight.view(torch.uint8))
        assert torch.equal(scale, plain.scales)


@grid(backend=BACKENDS, p=[0.1, 0.9], format=FORMATS)
def test_dropout(backend, p, format):
    x, residual, weight, eps = placed(
        inputs("add_rms_norm", (5, 300), torch.float32), device_of(backend)
    )
    with fusedops.backend(backend):
        torch.manual_seed(3)
        (codes, scale), h = add_rms_norm(
            x, residual, weight, eps, dropout_p=p, output_format=format
        )
        torch.manual_seed(3)
        y, plain = add_rms_norm(x, residual, weight, eps, dropout_p=p)
    assert torch.equal(h, plain)
    pair = quantize_weight(y, format)
    assert torch.equal(codes.view(torch.uint8), pair.qweight.view(torch.uint8))
    assert torch.equal(scale, pair.scales)


LAYOUTS = {
    "transposed": lambda make: make(64, 12).t(),
    "slice of rows": lambda make: make(12, 96)[:, 3:67],
    "every second column": lambda make: make(12, 128)[:, ::2],
    "expanded": lambda make: make(1, 64).expand(12, 64),
    "misaligned": lambda make: make(12 * 64 + 1)[1:].view(12, 64),
    "transposed batch": lambda make: make(4, 3, 64).transpose(0, 1),
}


@grid("op,backend", CASES, layout=LAYOUTS, dtype=[torch.float32, torch.float16])
def test_strides(op, backend, layout, dtype):
    x, other = (LAYOUTS[layout](lambda *shape: torch.randn(shape, dtype=dtype)) for _ in range(2))
    n = x.shape[-1]
    args = (x, other if "add" in op else (n,), torch.randn(2 * n, dtype=dtype)[::2], 1e-6)
    for format in FORMATS:
        compare(op, backend, args, format)


@grid("op,backend", CASES, shape=[(0, 8), (3, 0), (0, 0), (2, 0, 4)], format=FORMATS)
def test_empty(op, backend, shape, format):
    compare(op, backend, inputs(op, shape, torch.float32), format)


@grid(
    pytest.mark.parametrize("n", [70, 64], ids=["element by element", "by vectors"]),
    "op,backend",
    CASES,
    format=FORMATS,
    dtype=FLOATS,
    bad=[float("nan"), float("inf"), -float("inf")],
)
def test_rows_that_are_not_finite(op, backend, format, dtype, bad, n):
    """They have codes of 0 and a NaN scale; other rows do not change."""
    args = placed(inputs(op, (4, n), dtype), device_of(backend))
    plain = run_on(backend, OPS[op][0], args, output_format=format)
    args[0][2, 5] = bad
    rows = run_on(backend, OPS[op][0], args, output_format=format)
    rows, plain = (p[0] if "add" in op else p for p in (rows, plain))
    codes, scale = rows
    assert scale[2].isnan().all() and not codes[2].float().any()
    assert dequantized(rows)[2].isnan().all()
    for row in (0, 1, 3):
        assert torch.equal(codes[row].float(), plain[0][row].float())
        assert torch.equal(scale[row], plain[1][row])


@grid("op,backend", CASES, format=FORMATS)
def test_rows_of_zeros_and_of_tiny_numbers(op, backend, format):
    x = torch.ones(3, 70)
    x[0] = 0
    weight = torch.ones(70)
    tiny = torch.full((70,), 1e-38)
    for w in (weight, tiny):
        args = (x, torch.zeros_like(x) if "add" in op else (70,), w, 1e-6)
        result = run_on(backend, OPS[op][0], args, output_format=format)
        codes, scale = result[0] if "add" in op else result
        assert not codes[0].float().any() and not scale[0].any()
        assert torch.equal(dequantized((codes, scale))[0].cpu(), torch.zeros(70))
        assert (codes[1].float() == (0 if w is tiny else {"int8": 127, "fp8": 448}[format])).all()


@grid("op,backend", CASES, format=FORMATS)
def test_float64_is_quantized_in_float32(op, backend, format):
    args = placed(inputs(op, (4, 50), torch.float64), device_of(backend))
    compare(op, backend, args, format)


@grid("op,backend", CASES, dtype=FLOATS, format=FORMATS)
def test_same_bits_whatever_the_threads_and_rows(op, backend, dtype, format):
    args = placed(inputs(op, (300, 257), dtype), device_of(backend))
    few = tuple(a[:7] if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args)

    def run(args, count):
        with threads(count), fusedops.backend(backend), poisoned():
            result = OPS[op][0](*args, output_format=format)
        return (*result[0], result[1]) if "add" in op else result

    first = run(args, 1)
    for other, rows in ((run(args, 3), None), (run(few, 1), 7)):
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a[:rows].float(), b.float())


def test_wide_arguments_are_used():
    """exact_rows is the reference in float64, where nothing rounds."""
    for op, (_, reference) in OPS.items():
        args = wide(inputs(op, (5, 40), torch.float32))
        y = reference(*args, rounding="torch")
        torch.testing.assert_close(exact_rows(op, args), y[0] if "add" in op else y)


WANTS_GRADIENT = r"{}: output_format='int8' has no gradient, but an input requires one"


@pytest.mark.parametrize("which", range(3))
def test_gradients_are_refused(which):
    args = inputs("add_rms_norm", (4, 8), torch.float32)
    args[which].requires_grad_()
    with pytest.raises(RuntimeError, match=WANTS_GRADIENT.format("add_rms_norm")):
        add_rms_norm(*args, output_format="int8")
    with torch.no_grad():
        (codes, scale), h = add_rms_norm(*args, output_format="int8")
    with torch.inference_mode():
        (again, _), _ = add_rms_norm(*args, output_format="int8")
    assert torch.equal(codes, again) and not (scale.requires_grad or h.requires_grad)
    if which != 1:
        x, _, weight, eps = args
        with pytest.raises(RuntimeError, match=WANTS_GRADIENT.format("rms_norm")):
            rms_norm(x, (8,), weight, eps, output_format="int8")


def test_transforms():
    args = inputs("add_rms_norm", (3, 4, 40), torch.float32)
    x, residual, weight, eps = args

    def run(x, residual):
        (codes, scale), h = add_rms_norm(x, residual, weight, eps, output_format="int8")
        return codes, scale, h

    for a, b in zip(torch.vmap(run)(x, residual), run(x, residual), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1 if a.dtype == torch.int8 else 1e-6)
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.func.jvp(run, (x, residual), (x, residual))
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.func.grad(lambda x: run(x, residual)[2].sum())(x)


@grid(format=FORMATS, dynamic=[False, True], backend=["aot_eager", "inductor"])
def test_compiles(format, dynamic, backend):
    args = inputs("add_rms_norm", (6, 40), torch.bfloat16)

    def run(x, residual, weight, eps):
        return add_rms_norm(x, residual, weight, eps, output_format=format)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=backend)
    (codes, scale), h = run(*args)
    (codes_too, scale_too), h_too = compiled(*args)
    assert torch.equal(codes.float(), codes_too.float())
    assert torch.equal(scale, scale_too) and torch.equal(h, h_too)


@grid(op=OPS, format=FORMATS)
def test_meta_tensors_have_the_shapes(op, format):
    args = inputs(op, (2, 3, 40), torch.bfloat16, residual_dtype=torch.float32)
    meta = placed(args, torch.device("meta"))
    real, on_meta = (OPS[op][0](*a, output_format=format) for a in (args, meta))
    flat = lambda r: (*r[0], r[1]) if "add" in op else r  # noqa: E731
    for a, b in zip(flat(real), flat(on_meta), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) and b.is_meta


@pytest.mark.parametrize("op", OPS)
def test_jagged_tensors(op):
    parts = [torch.randn(n, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    x, weight = torch.cat(parts), torch.randn(16)
    other = (lambda t: t) if "add" in op else (lambda t: (16,))
    with torch.no_grad():
        out, plain = (OPS[op][0](t, other(t), weight, output_format="int8") for t in (nested, x))
    out, plain = (p[0] if "add" in op else p for p in (out, plain))
    assert all(t.is_nested for t in out)
    assert all(torch.equal(a.values(), b) for a, b in zip(out, plain, strict=True))


ERRORS = {
    r"rms_norm: output_format must be None, 'int8' or 'fp8', got 'int4'": (
        ValueError,
        lambda: rms_norm(torch.zeros(4), (4,), output_format="int4"),
    ),
    r"add_rms_norm: output_format must be None, 'int8' or 'fp8', got 'none'": (
        ValueError,
        lambda: add_rms_norm(torch.zeros(4), torch.zeros(4), output_format="none"),
    ),
    r"rms_norm: output_format must be None, 'int8' or 'fp8', got torch.int8": (
        TypeError,
        lambda: rms_norm(torch.zeros(4), (4,), output_format=torch.int8),
    ),
    r"^add_rms_norm: output_format must be None, 'int8' or 'fp8', got 8": (
        TypeError,
        lambda: add_rms_norm(torch.zeros(4), torch.zeros(4), output_format=8),
    ),
    r"add_rms_norm: output_format needs one normalised dimension, got \[3, 4\]": (
        RuntimeError,
        lambda: add_rms_norm(
            torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.ones(3, 4), output_format="int8"
        ),
    ),
    r"add_rms_norm: residual must be float32 \[4, 8\] like x, got float32 \[4, 9\]": (
        RuntimeError,
        lambda: add_rms_norm(torch.zeros(4, 8), torch.zeros(4, 9), output_format="fp8"),
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=message):
        call()
