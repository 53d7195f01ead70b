"""Triton quantized_linear kernels: split depth, scratch weights, row limits, no synchronization."""

import pytest
import torch
from axes import grid

import fusedops
from fusedops import _C
from fusedops.references.linear import ACTIVATIONS
from fusedops.references.quantized_linear import NF4
from fusedops.references.quantized_rows import rounded_rows
from fusedops.testing import backends, device_of
from quantized_linear.cases import FLOATS, FORMATS, compare, inputs, quantized, random_weight

if "triton" not in backends("quantized_linear"):
    pytest.skip("Triton cannot run here", allow_module_level=True)


from fusedops.triton.quantized_linear import backward, call, finish, forward, rows
from fusedops.triton.tile import multiprocessors

DEVICE = device_of("triton")
KINDS = pytest.mark.parametrize("kind", FORMATS)
OP = torch.ops.fusedops


@KINDS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_weight_in_scratch_memory(kind, dtype):
    weight = quantized(kind, random_weight(33, 48))
    compare(weight, "triton", inputs((1030, 48), 33, dtype), activation="gelu")


@pytest.fixture
def scratch(monkeypatch):
    """Calls of any size."""
    for module in (forward, backward):
        monkeypatch.setattr(module, "gpu_kernel", lambda *_: "scratch")


@KINDS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_weight_in_scratch_memory_of_any_size(kind, activation, scratch):
    weight = quantized(kind, random_weight(33, 71))
    for bias in (True, False):
        args = inputs((20, 71), 33, torch.bfloat16, bias)
        compare(weight, "triton", args, activation=activation)


@pytest.mark.parametrize(
    ("format", "k", "group_size", "narrow", "few"),
    [
        ("int4", 256, 32, True, 8),
        ("int4", 256, 64, True, 16),
        ("int4", 256, 128, True, 16),
        ("int4", 256, 64, False, 4),
        ("int4", 192, 64, True, 4),  # not whole chunks
        ("int4", 256, 16, True, 4),
        ("int8", 192, 192, True, 16),
        ("int8", 200, 200, True, 4),
        ("int8", 256, 64, True, 4),  # a scale for each group
        ("nf4", 256, 64, True, 16),
        ("nf4", 256, 64, False, 4),
        ("nf4", 192, 64, True, 4),
        ("fp8", 256, 256, True, 4),
    ],
)
def test_rows_on_tensor_cores(format, k, group_size, narrow, few):
    layout = format, 48, k, group_size
    assert _C.quantized_linear_few_rows(*layout, "none", "any", narrow) == few
    exact = 4 if format == "nf4" else few
    assert _C.quantized_linear_few_rows(*layout, "none", "exact", narrow) == exact
    assert _C.quantized_linear_few_rows(*layout, "int8", "any", narrow) == 4
    plan, next_plan = (
        _C.quantized_linear_gpu_plan(*layout, few + more, "none", "any", few) for more in (0, 1)
    )
    assert "CUDA C++" in plan and ("tensor cores" in plan) == (few > 4)
    assert "a Triton kernel" in next_plan


def test_scratch_memory_is_not_for_what_it_would_round():
    for options in (("none", "exact"), ("int8", "any"), ("int8", "int8")):
        assert _C.quantized_linear_gpu_kernel(5000, *options) == "tiles"


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "fp8"])
def test_any_number_of_parts(kind, monkeypatch):
    """More than there are tiles for as well: the last ones then have none."""
    weight = quantized(kind, random_weight(9, 300))
    for parts in (2, 3, 7):
        monkeypatch.setattr(forward, "parts_of", lambda *_, parts=parts: parts)
        for kwargs in ({}, {"input_format": "int8"}, {"input_format": "fp8"}):
            compare(
                weight, "triton", inputs((6, 300), 9, torch.float32), activation="silu", **kwargs
            )


def test_parts_of_more_numbers_than_a_program_joins():
    rows, n = 5, finish.TILE // 2
    sums = torch.randn(2, rows, n, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    y = torch.empty(rows, n, device=DEVICE)
    finish.join(sums, y)
    assert torch.equal(y, sums[0] + sums[1])


def test_parts_fill_the_gpu_and_are_worth_a_program():
    few = 2 * multiprocessors(DEVICE)
    assert call.parts_of(1, 1000, DEVICE) == min(few, call.MOST_PARTS)
    assert call.parts_of(few, 1000, DEVICE) == 1
    assert call.parts_of(1, 2 * call.LEAST_TILES, DEVICE) == min(2, few)
    assert call.parts_of(1, 0, DEVICE) == call.parts_of(0, 1, DEVICE) == 1


@grid(dtype=FLOATS, k=[1, 33, 5000], format=["int8", "fp8"])
def test_rows_of_codes(dtype, k, format):
    """They equal the reference's: halves go to even codes, and nothing is rounded twice."""
    x = torch.randn(7, k, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[0] *= 2.0 ** -(torch.arange(k) % 14)  # to below fp8's normal numbers
    x[0, -1] = 9
    x[1], x[2], x[6] = 0, 1e-39, 6e-37  # the last of a step that has an inverse
    x[3, -1], x[4, 0] = torch.nan, -torch.inf
    x[5] = torch.arange(k).remainder(255).sub(127) / 2
    x[5, -1] = 63.5
    dtypes = (torch.int8,) if format == "int8" else (torch.bfloat16, torch.float8_e4m3fn)
    for dtype in dtypes:
        compare_codes(x, *rows.quantized_rows(x.to(DEVICE), format, dtype), format)


def compare_codes(x, codes, steps, format):
    expected = rounded_rows(x.float(), format)
    actual = (codes.float() * steps[:, None]).cpu()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert steps.isnan().tolist() == [False, False, False, True, True, False, False]
    assert codes.stride(0) % 16 == 0


@pytest.mark.parametrize("arch,has", [(80, False), (89, True), (90, True), (100, True)])
def test_which_products_are_of_fp8(arch, has, monkeypatch):
    """fp8 by fp8 where the GPU has it, but for float32's sums."""
    monkeypatch.setattr(call, "INTERPRETING", False)
    monkeypatch.setattr(call, "architecture", lambda device: arch)
    for kind in ("fp8", "int8"):
        parts = quantized(kind, random_weight(9, 64))
        w = call.Weight.of(parts.qweight, parts.scales, None, kind, 9, 64, 64)
        for compute in ("any", "bf16", "exact"):
            expected = has and kind == "fp8" and compute != "exact"
            assert call.multiplies_e4m3(w, compute) == expected


def test_the_table_of_nf4_is_the_references():
    assert _C.nf4_table() == torch.tensor(NF4).tolist()


def test_no_word_is_the_name_of_a_type():
    """Triton makes it one on the way to a kernel, which compares it with the word."""
    from triton._utils import type_canonicalisation_dict as types

    operands = {call.operand_of(compute) for compute in ("any", "exact")} | call.FEW.keys()
    words = {*call.NAMES.values(), *operands, "halves", "whole", "flat", "row", "tile", "each"}
    assert not words & (types.keys() | set(types.values()))


@pytest.mark.parametrize("kind", FORMATS)
def test_how_codes_lie(kind):
    for k, nf4_form in ((70, "halves"), (71, "flat")):
        w = quantized(kind, random_weight(5, k))
        of = call.Weight.of(w.qweight, w.scales, w.zeros, w.format, 5, k, w.group_size)
        assert of.form == {"int4": "halves", "nf4": nf4_form}.get(w.format, "whole")


def test_the_operator_of_tiles_is_the_forward():
    w = quantized("int4", random_weight(5, 64)).to(DEVICE)
    x, bias = (t.to(DEVICE) for t in inputs((3, 64), 5, torch.float32))
    args = x, w.qweight, w.scales, w.zeros, bias, "int4", 5, 64, 64, "silu", "none", "any", True
    with fusedops.backend("triton"):
        actual, expected = OP.quantized_linear_tiles(*args), OP.quantized_linear_forward(*args)
    assert all(map(torch.equal, actual, expected))
    plain = OP.quantized_linear_tiles(*args)
    torch.testing.assert_close(plain, expected, rtol=0.02, atol=0.02)
