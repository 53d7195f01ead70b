"""The CUDA kernel that quantizes inputs (quantize.cu) gives the codes of the reference.

A column of the weight is 1 in one place. So the result is a chosen element's code, times the row's
scale. A block of 512 threads holds 16384 float32 at a time, 32768 elements of 16 bits, or 4096
single elements of rows that are not whole vectors.
"""

import pytest
import torch
from axes import grid

import fusedops
from fusedops.functional import QuantizedWeight, quantized_linear
from fusedops.references.quantized_rows import rounded_rows
from fusedops.testing import device_of, poisoned
from quantized_linear.cases import BACKENDS, FLOATS

KERNELS = [name for name in BACKENDS if name in ("simt", "cuda")]
CODES = ["int8", "fp8"]
pytestmark = pytest.mark.skipif(not KERNELS, reason="no CUDA kernels in this build")

# A part of a warp; one warp; several; odd; a whole block; part of the threads' second vectors; one
# piece, and a vector or an element more; several pieces.
DEPTHS = [8, 256, 1000, 1003, 4096, 4097, 6144, 16384, 16392, 16385, 32768, 32776, 70000]


def rows_of(depth, dtype):
    """Three rows. Their largest elements are the last one, the first one, and in the middle."""
    x = torch.randn(3, depth, generator=torch.Generator().manual_seed(depth)) ** 3
    for row, at in enumerate((-1, 0, depth // 2)):
        x[row, at] = (-1) ** row * x[row].abs().max() * 1.5
    return x.to(dtype)


def chosen(depth):
    """Both ends of the row, of pieces and of vectors, and 60 elements anywhere."""
    ends = [at + by for at in (0, 4096, 16384, 32768, 65536, depth) for by in (-9, -1, 0, 1, 7)]
    drawn = torch.randint(0, depth, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    return sorted({at for at in (*ends, *drawn) if 0 <= at < depth})


def codes_of(x, format, backend, columns):
    n, depth = len(columns), x.shape[1]
    one_hot = torch.zeros(n, depth, dtype=torch.int8)
    one_hot[range(n), columns] = 1
    weight = QuantizedWeight("int8", n, depth, depth, one_hot, torch.ones(n, 1))
    device = device_of(backend)
    with fusedops.backend(backend), poisoned():
        y = quantized_linear(x.to(device), weight.to(device), input_format=format, compute="exact")
    return y.cpu()


@grid(backend=KERNELS, format=CODES, dtype=FLOATS, depth=DEPTHS)
def test_codes_of_every_depth(backend, format, dtype, depth):
    x, columns = rows_of(depth, dtype), chosen(depth)
    expected = rounded_rows(x, format)[:, columns]
    assert torch.equal(codes_of(x, format, backend, columns), expected.to(dtype))


@grid(backend=KERNELS, format=CODES, dtype=FLOATS, depth=[256, 1003, 16392, 40000])
def test_addresses_do_not_change_the_codes(backend, format, dtype, depth):
    """Misaligned rows, rows that start at odd distances, and rows of odd lengths that do not."""
    x, columns = rows_of(depth, dtype), chosen(depth)
    expected = codes_of(x, format, backend, columns)
    misaligned = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(3, depth)
    for gap in (1, -depth % 16):
        apart = torch.cat([x, x.new_ones(3, gap)], 1)[:, :depth]
        assert torch.equal(codes_of(apart, format, backend, columns), expected)
    assert torch.equal(codes_of(misaligned, format, backend, columns), expected)


@grid(backend=KERNELS, format=CODES, depth=[256, 16384, 40000], bad=["nan", "inf", "-inf"])
def test_an_element_that_is_not_finite(backend, format, depth, bad):
    """Wherever it is, its row is NaN, and no other."""
    columns = chosen(depth)
    for at in (0, depth // 2, depth - 1):
        x = rows_of(depth, torch.float32)
        x[1, at] = float(bad)
        rows = codes_of(x, format, backend, columns)
        assert rows[1].isnan().all() and rows[::2].isfinite().all()
