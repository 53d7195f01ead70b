"""quantized_linear's tensor-core kernel for up to 16 rows of 16-bit floats, in the emulator.

Chunks of a row are 128 codes of 4 bits or 64 of 8. A block has 8 warps, and 16 for one row.
"""

import dataclasses

import pytest
import torch
from axes import grid

import fusedops
from fusedops.functional import dequantize_weight, quantize_weight, quantized_linear
from fusedops.references.quantized_linear import NF4, quantized_linear_reference
from quantized_linear.cases import BACKENDS, compare_forward, functions, inputs, random_weight

pytestmark = pytest.mark.skipif("simt" not in BACKENDS, reason="no emulator in this build")

HALVES = [torch.float16, torch.bfloat16]
# Format, group size, and the most rows.
WEIGHTS = [
    ("int4", 32, 8),
    ("int4", 64, 16),
    ("int4", 128, 16),
    ("int8", None, 16),
    ("nf4", None, 16),
]
EACH = [(format, size, rows) for format, size, most in WEIGHTS for rows in range(1, most + 1)]


def quantized(format, group_size, features, depth):
    return quantize_weight(random_weight(features, depth), format, group_size=group_size)


def operators_of(run):
    """The names of the operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("format,group_size,rows", EACH)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_count_of_rows(format, group_size, rows, dtype):
    weight = quantized(format, group_size, 35, 384)
    for compute in (None, "exact"):
        compare_forward(*functions(weight, compute=compute), inputs((rows, 384), 35, dtype))


# One chunk; a warp without one; several for each warp; blocks of rows that the weight does not
# fill; a depth that is split among blocks.
SHAPES = [(1, 128, 1), (1, 128 * 17, 33), (2, 4096, 5), (3, 2048, 70), (6, 1024, 140)]
SHAPES += [(12, 640, 260), (1, 128 * 70, 40), (8, 128 * 36, 30), (16, 128 * 19, 20)]


@grid(
    "format,group_size",
    [weight[:2] for weight in WEIGHTS],
    "rows,depth,features",
    SHAPES,
    dtype=HALVES,
)
def test_shapes(format, group_size, rows, depth, features, dtype):
    rows = min(rows, 8) if group_size == 32 else rows
    weight = quantized(format, group_size, features, depth)
    both = functions(weight, activation="silu")
    compare_forward(*both, inputs((rows, depth), features, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format,group_size,most", WEIGHTS)
def test_the_next_operator_has_more_rows(format, group_size, most, dtype):
    run, _ = functions(quantized(format, group_size, 8, 256))
    for rows in (most, most + 1):
        args = inputs((rows, 256), 8, dtype)
        with fusedops.backend("simt"):
            operators = operators_of(lambda args=args: run(*args))
        assert ("fusedops::quantized_linear_tiles" in operators) == (rows > most)


@pytest.mark.parametrize("misaligned", ["x", "codes"])
def test_misaligned_rows_go_to_the_next_operator(misaligned):
    weight = quantized("int8", None, 8, 256)
    x, bias = inputs((8, 256), 8, torch.float16)
    if misaligned == "x":
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(8, 256)
    else:
        codes = torch.cat([weight.qweight.new_zeros(1), weight.qweight.flatten()])[1:]
        weight = dataclasses.replace(weight, qweight=codes.view(8, 256))
    compare_forward(*functions(weight), (x, bias))


@grid(
    "format,group_size",
    [weight[:2] for weight in WEIGHTS],
    dtype=HALVES,
    bad=[float("nan"), float("inf"), -float("inf")],
    rows=[3, 8],
)
def test_what_is_not_finite_stays_in_its_row(format, group_size, dtype, bad, rows):
    q = quantized(format, group_size, 20, 256)
    x, bias = inputs((rows, 256), 20, dtype)
    x[1, 77] = bad
    with fusedops.backend("simt"):
        actual = quantized_linear(x, q, bias)
    sizes = q.format, q.out_features, q.in_features, q.group_size
    expected = quantized_linear_reference(x, q.qweight, q.scales, q.zeros, bias, *sizes)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert actual[0].isfinite().all() and not actual[1].isfinite().any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_zeros_of_a_byte(dtype):
    """Other libraries' weights may have zeros up to 255."""
    q = quantized("int4", 64, 20, 256)
    zeros = torch.randint(0, 256, q.zeros.shape, dtype=torch.uint8)
    x, bias = inputs((3, 256), 20, dtype)
    q = dataclasses.replace(q, scales=q.scales / 16, zeros=zeros)
    compare_forward(*functions(q, compute="exact"), (x, bias))


@pytest.mark.parametrize("x_value,count", [(5e37, 8), (2.42e36, 1)], ids=["nan", "infinite"])
def test_sums_that_fit_though_those_of_codes_do_not(x_value, count):
    """Codes and zeros are summed with 128 added.

    With eight numbers of 5e37 both sums are infinite, and their difference is NaN. With one of
    2.42e36 the code's part, 143 times it, is infinite. The zero's part is at most 136 times it,
    which is finite, so the difference is infinite.
    """
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    x[:, :count] = x_value
    weight = random_weight(5, 128)
    weight[:, 0] = weight.abs().amax(1)  # the largest code
    q = quantize_weight(weight, "int4", group_size=64)
    compare_forward(*functions(q), (x, torch.zeros(5, dtype=torch.bfloat16)))


@pytest.mark.parametrize("format,group_size,most", WEIGHTS)
def test_a_weight_that_is_nan_stays_in_its_column(format, group_size, most):
    weight = random_weight(20, 256)
    weight[3] = float("nan")
    q = quantize_weight(weight, format, group_size=group_size)
    x, bias = inputs((most, 256), 20, torch.float16)
    with fusedops.backend("simt"):
        y = quantized_linear(x, q, bias)
    assert y[:, 3].isnan().all() and y.isnan().sum() == most


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_code_is_exact(dtype):
    """Each column has another code in one place; x is 1 there, and large elsewhere in its row."""
    codes = torch.zeros(256, 64, dtype=torch.int8)
    codes[:, 5] = torch.arange(256).to(torch.uint8).view(torch.int8)
    q = fusedops.functional.QuantizedWeight("int8", 256, 64, 64, codes, torch.ones(256, 1))
    x = torch.full((2, 64), 1000, dtype=dtype)
    x[:, 5] = 1
    with fusedops.backend("simt"):
        y = quantized_linear(x, q, compute="exact")
    assert torch.equal(y, codes[:, 5].to(dtype).expand(2, 256))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pair_of_nf4_codes_is_a_number_of_16_bits(dtype):
    """Each column has another byte in one place; x is 1 at one of its codes, and 0 elsewhere."""
    codes = torch.zeros(256, 64, dtype=torch.uint8)
    codes[:, 37] = torch.arange(256)
    scales = torch.ones(512)
    q = fusedops.functional.QuantizedWeight("nf4", 256, 128, 64, codes.view(-1, 1), scales)
    x = torch.zeros(2, 128, dtype=dtype)
    x[0, 74] = x[1, 75] = 1
    with fusedops.backend("simt"):
        actual = quantized_linear(x, q)
    table = torch.tensor(NF4)
    expected = torch.stack([table.repeat_interleave(16), table.repeat(16)])
    torch.testing.assert_close(actual.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("rows", [1, 5])
def test_rounded_nf4_numbers_do_not_add_up(rows):
    """Errors of a positive x would be thousands of times one number's if they had one sign."""
    weight = quantize_weight(random_weight(64, 4096), "nf4")
    x = torch.ones(rows, 4096, dtype=torch.bfloat16)
    with fusedops.backend("simt"):
        y = quantized_linear(x, weight)
    values = dequantize_weight(weight).double()
    error = (y.double() - values.sum(1)).square().mean().sqrt()
    assert error <= 5e-3 * values.square().sum(1).mean().sqrt()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_exact_nf4_is_not_rounded(dtype):
    """Each row of x has one 1. Beyond 4 rows another operator keeps the weight's numbers."""
    weight = quantized("nf4", None, 35, 256)
    run, _ = functions(weight, compute="exact")
    x = torch.eye(256, dtype=dtype)[77:82]
    with fusedops.backend("simt"):
        y = run(x[:4], None)
        operators = operators_of(lambda: run(x, None))
    assert torch.equal(y, dequantize_weight(weight)[:, 77:81].T.to(dtype))
    assert "fusedops::quantized_linear_tiles" in operators
