"""Quantized rows of rms_norm and add_rms_norm: roundings, dtypes, dropout and jagged tensors.

What all such operators do is tested in tests/contract/test_quantized_rows.py.
"""

import pytest
import torch
from axes import grid
from contract.family import FAMILIES
from contract.quantized_rows import FORMATS, codes_of, compare, wide

import fusedops
from fusedops.functional import add_rms_norm, quantize_weight
from fusedops.testing import device_of, placed
from norm.cases import BACKENDS as ALL
from norm.cases import FLOATS, inputs

CODED = FAMILIES["norm"].coded_rows
BACKENDS = [name for name in ALL if name != "triton"]  # there it is ATen calls
CASES = [(op, name) for op in CODED for name in BACKENDS]


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
    compare(CODED[op], backend, args, format, rounding=rounding, offset=offset)
    compare(CODED[op], backend, (*args[:2], None, 1e-6), format, rounding=rounding)


@grid(
    backend=BACKENDS,
    dtype=FLOATS,
    residual_dtype=FLOATS,
    format=FORMATS,
    weight_dtype=[torch.float32, torch.bfloat16],
)
def test_residual_in_another_dtype(backend, dtype, residual_dtype, format, weight_dtype):
    args = inputs("add_rms_norm", (6, 90), dtype, weight_dtype, residual_dtype)
    compare(CODED["add_rms_norm"], backend, args, format, rounding="llama")


@grid(backend=BACKENDS, p=[0.1, 0.9], format=FORMATS)
def test_dropout(backend, p, format):
    args = placed(inputs("add_rms_norm", (5, 300), torch.float32), device_of(backend))
    with fusedops.backend(backend):
        torch.manual_seed(3)
        (codes, scale), h = add_rms_norm(*args, dropout_p=p, output_format=format)
        torch.manual_seed(3)
        y, plain = add_rms_norm(*args, dropout_p=p)
    assert torch.equal(h, plain)
    pair = quantize_weight(y, format)
    assert torch.equal(codes.view(torch.uint8), pair.qweight.view(torch.uint8))
    assert torch.equal(scale, pair.scales)


@pytest.mark.parametrize("op", CODED)
def test_the_exact_rows_are_the_references_in_float64(op):
    args = wide(inputs(op, (5, 40), torch.float32))
    y = CODED[op].reference(*args, rounding="torch")
    exact = CODED[op].exact(args, rounding="torch")
    torch.testing.assert_close(exact, y[0] if "add" in op else y)


@pytest.mark.parametrize("op", CODED)
def test_jagged_tensors(op):
    parts = [torch.randn(n, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    x, weight = torch.cat(parts), torch.randn(16)
    with torch.no_grad():
        out, plain = (
            CODED[op].function(t, t if "add" in op else (16,), weight, output_format="int8")
            for t in (nested, x)
        )
    out, plain = codes_of(out), codes_of(plain)
    assert all(t.is_nested for t in out)
    assert all(torch.equal(a.values(), b) for a, b in zip(out, plain, strict=True))
