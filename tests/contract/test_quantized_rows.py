"""Operators with `output_format` return quantized rows: int8 or fp8 codes, with a scale per row."""

import pytest
import torch
from axes import grid

import fusedops
from contract.family import F16, F32, F64, FAMILIES, each
from contract.quantized_rows import FORMATS, codes_of, compare, dequantized, run_on
from fusedops.functional import quantize_weight
from fusedops.testing import backends, device_of, placed, poisoned, threads

CODED = {
    f"{family}-{name}": coded
    for family, record in FAMILIES.items()
    for name, coded in record.coded_rows.items()
}
# Triton has no kernels of them: there they are ATen calls.
CASES = [
    (name, backend)
    for name, coded in CODED.items()
    for backend in backends(coded.operator)
    if backend not in ("reference", "triton")
]
FLOATS = [F32, F16, torch.bfloat16]
SHAPES = [(1, 1), (7, 33), (2, 3, 1024), (3, 4099), (130, 5), (1, 70001), (40,)]
EACH = each("coded", lambda family: ((n, (coded,)) for n, coded in family.coded_rows.items()))


def rows_of(args):
    """The places of the tensors that have the rows."""
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dim() > 1]


@grid("name,backend", CASES, dtype=FLOATS, format=FORMATS, shape=SHAPES)
def test_codes(name, backend, dtype, format, shape):
    for options in CODED[name].options:
        compare(CODED[name], backend, CODED[name].draw(shape, dtype), format, **options)


@grid("name,backend", CASES, format=FORMATS)
def test_codes_are_those_of_the_plain_result(name, backend, format):
    """Bit for bit where y is float32: then its last rounding is none."""
    coded = CODED[name]
    args = placed(coded.draw((50, 1000), F32), device_of(backend))
    for options in coded.options:
        with fusedops.backend(backend):
            y = coded.function(*args, **options)
            codes, scale = codes_of(coded.function(*args, output_format=format, **options))
        plain = quantize_weight(y[0] if isinstance(y, tuple) else y, format)
        assert torch.equal(codes.view(torch.uint8), plain.qweight.view(torch.uint8))
        assert torch.equal(scale, plain.scales)


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "slice of rows": lambda t: torch.cat([t[:, :3], t, t], 1)[:, 3 : 3 + t.shape[1]],
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda t: t[:1].expand_as(t),
    "misaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
    "transposed batch": lambda t: t.view(4, 3, -1).transpose(0, 1),
}


@grid("name,backend", CASES, layout=LAYOUTS, dtype=[F32, F16])
def test_strides(name, backend, layout, dtype):
    args = list(CODED[name].draw((12, 64), dtype))
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            args[i] = LAYOUTS[layout](a) if a.dim() > 1 else a.repeat_interleave(2)[::2]
    for format in FORMATS:
        compare(CODED[name], backend, tuple(args), format)


@grid("name,backend", CASES, shape=[(0, 8), (3, 0), (0, 0), (2, 0, 4)], format=FORMATS)
def test_empty(name, backend, shape, format):
    compare(CODED[name], backend, CODED[name].draw(shape, F32), format)


@grid(
    pytest.mark.parametrize("n", [70, 64], ids=["element by element", "by vectors"]),
    "name,backend",
    CASES,
    format=FORMATS,
    dtype=FLOATS,
    bad=[float("nan"), float("inf")],
)
def test_rows_that_are_not_finite(name, backend, format, dtype, bad, n):
    """They have codes of 0 and a NaN scale; other rows do not change."""
    function = CODED[name].function
    args = placed(CODED[name].draw((4, n), dtype), device_of(backend))
    plain = codes_of(run_on(backend, function, args, output_format=format))
    args[0][2, 5] = bad
    codes, scale = rows = codes_of(run_on(backend, function, args, output_format=format))
    assert scale[2].isnan().all() and not codes[2].float().any()
    assert dequantized(rows)[2].isnan().all()
    for row in (0, 1, 3):
        assert torch.equal(codes[row].float(), plain[0][row].float())
        assert torch.equal(scale[row], plain[1][row])


@grid("name,backend", CASES, format=FORMATS)
def test_rows_of_zeros_and_of_tiny_numbers(name, backend, format):
    """The scale of tiny numbers has no reciprocal in float32: their codes are 0."""
    function = CODED[name].function
    args = placed(CODED[name].draw((3, 70), F32), device_of(backend))
    for place in rows_of(args):
        args[place][0] = 0
    codes, scale = rows = codes_of(run_on(backend, function, args, output_format=format))
    assert not codes[0].float().any() and not scale[0].any() and not dequantized(rows)[0].any()
    assert codes[1:].float().any(1).all() and (scale[1:] > 0).all()
    last = [a for a in args if isinstance(a, torch.Tensor)][-1]  # a weight, or a factor
    last.mul_(1e-38)
    codes, scale = codes_of(run_on(backend, function, args, output_format=format))
    assert not codes.float().any() and scale.isfinite().all()


@grid("name,backend", CASES, format=FORMATS)
def test_float64_is_quantized_in_float32(name, backend, format):
    compare(CODED[name], backend, CODED[name].draw((4, 50), F64), format)


@grid("name,backend", CASES, dtype=FLOATS, format=FORMATS)
def test_same_bits_whatever_the_threads_and_rows(name, backend, dtype, format):
    args = placed(CODED[name].draw((300, 257), dtype), device_of(backend))
    few = tuple(a[:7] if i in rows_of(args) else a for i, a in enumerate(args))

    def run(args, count):
        with threads(count), fusedops.backend(backend), poisoned():
            result = CODED[name].function(*args, output_format=format)
        return (*codes_of(result), *result[1:]) if isinstance(result[0], tuple) else result

    first = run(args, 1)
    for other, rows in ((run(args, 3), None), (run(few, 1), 7)):
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a[:rows].float(), b.float())


@EACH
def test_gradients_are_refused(coded):
    args = coded.draw((4, 8), F32)
    message = f"{coded.operator}: output_format='fp8' has no gradient, but an input requires one"
    for place in [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]:
        args[place].requires_grad_()
        with pytest.raises(RuntimeError, match=message):
            coded.function(*args, output_format="fp8")
        with torch.no_grad():
            codes, scale = codes_of(coded.function(*args, output_format="fp8"))
        with torch.inference_mode():
            again, _ = codes_of(coded.function(*args, output_format="fp8"))
        assert torch.equal(codes.float(), again.float()) and not scale.requires_grad
        args[place].requires_grad_(False)


@EACH
def test_transforms(coded):
    args = coded.draw((3, 4, 40), F32)
    places = rows_of(args)

    def run(*rows):
        full = dict(enumerate(args)) | dict(zip(places, rows, strict=True))
        return codes_of(coded.function(*full.values(), output_format="int8"))

    rows = tuple(args[i] for i in places)
    (codes, scale), (expected, expected_scale) = torch.vmap(run)(*rows), run(*rows)
    torch.testing.assert_close(codes, expected, rtol=0, atol=1)
    torch.testing.assert_close(scale, expected_scale)
    for transform in (
        lambda: torch.func.jvp(run, rows, rows),
        lambda: torch.func.grad(lambda *rows: run(*rows)[1].sum())(*rows),
    ):
        with pytest.raises(RuntimeError, match="has no gradient"):
            transform()


@EACH
@pytest.mark.parametrize("format,backend", [("int8", "aot_eager"), ("fp8", "inductor")])
def test_compiles(coded, format, backend):
    args = coded.draw((6, 40), torch.bfloat16)

    def run(*args):
        return coded.function(*args, output_format=format)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for a, b in zip(codes_of(run(*args)), codes_of(compiled(*args)), strict=True):
        assert torch.equal(a.float(), b.float())


@EACH
@pytest.mark.parametrize("format", FORMATS)
def test_meta_tensors_have_the_shapes(coded, format):
    args = coded.draw((2, 3, 40), torch.bfloat16)
    on_meta = placed(args, torch.device("meta"))
    both = (codes_of(coded.function(*a, output_format=format)) for a in (args, on_meta))
    for a, b in zip(*both, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) and b.is_meta
