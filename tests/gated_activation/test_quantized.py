"""swiglu with `output_format` returns quantized rows: int8 or fp8 codes, with a scale per row."""

import pytest
import torch
from axes import grid
from contract.quantized_rows import FORMATS, check_rows, dequantized, run_on, wide

import fusedops
from fusedops.functional import quantize_weight, swiglu
from fusedops.references.gated_activation import swiglu_reference
from fusedops.testing import device_of, placed, poisoned, threads
from gated_activation.cases import BACKENDS, FLOATS, GPT_OSS, PACKED, inputs

SHAPES = [(1, 1), (7, 33), (2, 3, 1024), (3, 4099), (130, 5), (1, 70001), (40,)]


def compare(backend, args, format, **options):
    args = placed(args, device_of(backend))
    actual = run_on(backend, swiglu, args, output_format=format, **options)
    eager = swiglu_reference(*args, output_format=format, **options)
    check_rows(actual, eager, swiglu_reference(*wide(args), **options), format)


@grid(PACKED, backend=BACKENDS, dtype=FLOATS, format=FORMATS, shape=SHAPES)
def test_codes(backend, dtype, format, shape, packed):
    for options in ({}, GPT_OSS):
        compare(backend, inputs(shape, dtype, packed), format, **options)


@grid(PACKED, backend=BACKENDS, format=FORMATS)
def test_codes_are_those_of_the_plain_result(backend, format, packed):
    """Bit for bit where y is float32: then its last rounding is none."""
    args = placed(inputs((50, 1000), torch.float32, packed), device_of(backend))
    with fusedops.backend(backend):
        y, (codes, scale) = swiglu(*args), swiglu(*args, output_format=format)
    plain = quantize_weight(y, format)
    assert torch.equal(codes.view(torch.uint8), plain.qweight.view(torch.uint8))
    assert torch.equal(scale, plain.scales)


@grid(backend=BACKENDS, dtype=FLOATS, up_dtype=FLOATS, format=FORMATS)
def test_up_in_another_dtype(backend, dtype, up_dtype, format):
    compare(backend, inputs((6, 90), dtype, up_dtype=up_dtype), format)


@grid(backend=BACKENDS, dtype=[torch.float32, torch.float16], format=FORMATS)
def test_strides(backend, dtype, format):
    makes = {
        "transposed": lambda t: t.view(-1)[: 12 * 64].view(64, 12).t(),
        "slice of rows": lambda t: t[:, 3:67],
        "every second column": lambda t: t[:, ::2],
        "misaligned": lambda t: t.view(-1)[1 : 12 * 64 + 1].view(12, 64),
        "expanded": lambda t: t[:1, :64].expand(12, 64),
    }
    for view in makes.values():
        gate, up = (view(torch.randn(12, 128).to(dtype)) for _ in range(2))
        compare(backend, (gate, up), format)
        compare(backend, (gate,), format)


@grid(PACKED, backend=BACKENDS, shape=[(0, 8), (3, 0), (0, 0), (2, 0, 4)], format=FORMATS)
def test_empty(backend, shape, format, packed):
    compare(backend, inputs(shape, torch.float32, packed), format)


@grid(
    pytest.mark.parametrize("n", [70, 64], ids=["element by element", "by vectors"]),
    backend=BACKENDS,
    format=FORMATS,
    dtype=FLOATS,
    bad=[float("nan"), float("inf")],
)
def test_rows_that_are_not_finite(backend, format, dtype, bad, n):
    """They have codes of 0 and a NaN scale; other rows do not change."""
    args = placed(inputs((4, n), dtype), device_of(backend))
    plain = run_on(backend, swiglu, args, output_format=format)
    args[1][2, 5] = bad
    codes, scale = rows = run_on(backend, swiglu, args, output_format=format)
    assert scale[2].isnan().all() and not codes[2].float().any()
    assert dequantized(rows)[2].isnan().all()
    for row in (0, 1, 3):
        assert torch.equal(codes[row].float(), plain[0][row].float())
        assert torch.equal(scale[row], plain[1][row])


@grid(backend=BACKENDS, format=FORMATS)
def test_a_row_of_zeros(backend, format):
    gate, up = placed(inputs((4, 70), torch.float32), device_of(backend))
    up[1] = 0
    codes, scale = run_on(backend, swiglu, (gate, up), output_format=format)
    assert not codes[1].float().any() and not scale[1].any()
    assert scale[0].item() > 0 and codes[0].float().any()


@grid(backend=BACKENDS, format=FORMATS)
def test_float64_is_quantized_in_float32(backend, format):
    compare(backend, inputs((4, 50), torch.float64), format)


@grid(backend=BACKENDS, dtype=FLOATS, format=FORMATS)
def test_same_bits_whatever_the_threads_and_rows(backend, dtype, format):
    args = placed(inputs((300, 257), dtype), device_of(backend))

    def run(args, count):
        with threads(count), fusedops.backend(backend), poisoned():
            return swiglu(*args, output_format=format)

    first = run(args, 1)
    for other, rows in ((run(args, 3), None), (run(tuple(a[:7] for a in args), 1), 7)):
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a[:rows].float(), b.float())


@pytest.mark.parametrize("which", range(2))
def test_gradients_are_refused(which):
    args = inputs((4, 8), torch.float32)
    args[which].requires_grad_()
    with pytest.raises(RuntimeError, match="swiglu: output_format='fp8' has no gradient, but an"):
        swiglu(*args, output_format="fp8")
    with torch.no_grad():
        codes, _ = swiglu(*args, output_format="fp8")
    with torch.inference_mode():
        assert torch.equal(swiglu(*args, output_format="fp8")[0].float(), codes.float())


def test_transforms():
    gate, up = inputs((3, 4, 40), torch.float32)
    run = lambda g, u: swiglu(g, u, output_format="int8")  # noqa: E731
    codes, scale = torch.vmap(run)(gate, up)
    expected, expected_scale = run(gate, up)
    torch.testing.assert_close(codes, expected, rtol=0, atol=1)
    torch.testing.assert_close(scale, expected_scale)
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.func.jvp(run, (gate, up), (gate, up))


@grid(format=FORMATS, dynamic=[False, True], backend=["aot_eager", "inductor"])
def test_compiles(format, dynamic, backend):
    gate, up = inputs((6, 40), torch.bfloat16)
    run = lambda g, u: swiglu(g, u, output_format=format)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=backend)
    for a, b in zip(run(gate, up), compiled(gate, up), strict=True):
        assert torch.equal(a.float(), b.float())


@grid(format=FORMATS)
def test_meta_tensors_have_the_shapes(format):
    args = inputs((2, 3, 40), torch.bfloat16, packed=True)
    meta = placed(args, torch.device("meta"))
    both = (swiglu(*a, output_format=format) for a in (args, meta))
    for a, b in zip(*both, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) and b.is_meta


ERRORS = {
    r"swiglu: output_format must be None, 'int8' or 'fp8', got 'nf4'": (
        ValueError,
        lambda: swiglu(torch.zeros(4), output_format="nf4"),
    ),
    r"swiglu: output_format must be None, 'int8' or 'fp8', got torch.int8": (
        TypeError,
        lambda: swiglu(torch.zeros(4), output_format=torch.int8),
    ),
    r"swiglu: output_format needs at least one dimension, got float32 \[\]": (
        RuntimeError,
        lambda: swiglu(torch.zeros(()), torch.zeros(()), output_format="int8"),
    ),
    r"swiglu: limit must be at least 0, got -1": (
        ValueError,
        lambda: swiglu(torch.zeros(4), limit=-1.0, output_format="int8"),
    ),
    r"swiglu: up must have shape \[4, 8\] like gate, got float32 \[4, 9\]": (
        RuntimeError,
        lambda: swiglu(torch.zeros(4, 8), torch.zeros(4, 9), output_format="int8"),
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=message):
        call()
