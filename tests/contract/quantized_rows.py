"""Checks of operators that return quantized rows: int8 or fp8 codes, with a scale per row."""

from typing import Any

import torch
from torch import Tensor

import fusedops
from contract.family import CodedRows
from fusedops.references.quantized_rows import LARGEST, ROW_CODES
from fusedops.testing import device_of, placed, poisoned, yardstick

FORMATS = list(ROW_CODES)
NEAR = 2e-5  # of a number: closer to the middle of two codes, float32's sums may choose either
MOST_FLIPPED = 1e-3  # of the other codes: llama's rounding within the formula may flip too


def ordered(codes: Tensor) -> Tensor:
    """Codes as integers in which neighbours differ by 1."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def dequantized(pair: tuple[Tensor, Tensor]) -> Tensor:
    codes, scale = pair
    return codes.float() * scale


def rounded(y: Tensor, format: str) -> Tensor:
    """The nearest codes, in order."""
    most = LARGEST[format]
    y = (y.round() if format == "int8" else y).clamp(-most, most)
    return ordered(y.to(ROW_CODES[format]))


def check_rows(rows: tuple, eager: tuple, exact: Tensor, format: str) -> None:
    """rows, eager: pairs of the kernel and of the reference. exact: the rows in float64."""
    codes, scale = rows
    assert codes.dtype == ROW_CODES[format] and scale.dtype == torch.float32
    assert codes.shape == exact.shape and scale.shape == (*exact.shape[:-1], 1)
    assert codes.is_contiguous() and scale.is_contiguous()
    if not exact.numel():
        assert not scale.any()
        return
    exact_scale = exact.abs().amax(-1, keepdim=True) / LARGEST[format]
    torch.testing.assert_close(scale.double(), exact_scale, rtol=3e-6, atol=0)
    y, codes = torch.where(exact_scale == 0, 0, exact / exact_scale), ordered(codes)
    assert (codes - rounded(y, format)).abs().max() <= 1
    ends = rounded(y * (1 - NEAR), format), rounded(y * (1 + NEAR), format)
    outside = (codes < torch.minimum(*ends)) | (codes > torch.maximum(*ends))
    assert outside.sum() <= MOST_FLIPPED * outside.numel()
    if exact.shape[-1] == 1:  # the scale's error alone, which no quantization hides: see above
        return
    complaint = yardstick(dequantized(rows), dequantized(eager), exact)
    assert complaint is None, complaint


def codes_of(result: tuple) -> tuple[Tensor, Tensor]:
    """The codes and scales of a result, which may have the sum beside them."""
    return result[0] if isinstance(result[0], tuple) else result


def compare(coded: CodedRows, backend: str, args: tuple, format: str, **options: Any) -> None:
    """Checks the codes by `check_rows`, and that a sum beside them is the reference's.

    options: the first of coded.options if there are none.
    """
    options = options or coded.options[0]
    args = placed(args, device_of(backend))
    actual = run_on(backend, coded.function, args, output_format=format, **options)
    eager = coded.reference(*args, output_format=format, **options)
    if isinstance(actual[0], tuple):
        assert torch.equal(actual[1], eager[1]) and actual[1].dtype == eager[1].dtype
        assert actual[1].is_contiguous()
    check_rows(codes_of(actual), codes_of(eager), coded.exact(args, **options), format)


def run_on(backend: str, function, args: tuple, **options):
    with fusedops.backend(backend), poisoned():
        return function(*placed(args, device_of(backend)), **options)


def wide(args: tuple) -> tuple:
    """The arguments in float64."""
    return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
