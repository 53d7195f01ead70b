"""The definition of quantized rows: 8-bit codes with one scale per row.

fusedops/functional/quantized_rows.py describes the formats.
"""

import math

import torch
from torch import Tensor

ROW_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}  # largest code
SMALLEST = 1e-38  # smallest scale; its inverse is finite


def quantized_rows_reference(rows: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Quantizes rows, in float32: codes, and scale [..., 1]."""
    codes, scale = rounded_codes(rows.to(torch.float32), format)
    return codes.nan_to_num(0).to(ROW_CODES[format]).contiguous(), scale.contiguous()


def rounded_codes(rows: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """int8 codes, in rows' dtype, or codes before fp8's rounding; both may be NaN; and scale."""
    largest = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.sum(-1, keepdim=True)
    scale = finite_or_nan(largest) * (1 / LARGEST[format])
    codes = rows * inverse(scale)
    codes = codes.round() if format == "int8" else codes
    return codes.clamp(-LARGEST[format], LARGEST[format]), scale


def rounded_rows(x, input_format):
    """Rounds x's rows to codes scaled by the row's largest element; straight-through gradient."""
    codes, step = rounded_codes(x.detach().to(torch.float32), input_format)
    codes = codes if input_format == "int8" else codes.to(ROW_CODES["fp8"])
    acc = x.to(torch.promote_types(x.dtype, torch.float32))
    return acc + (codes.to(acc.dtype) * step - acc.detach())


def finite_or_nan(t: Tensor) -> Tensor:
    return torch.where(t.isfinite(), t, math.nan)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale < SMALLEST, 0, scale.reciprocal())
