"""Formats of quantized rows (8-bit codes with one scale per row), and their reference.

    scale = max |row| / largest         largest: 127 for int8, 448 for fp8 (float8_e4m3fn)
    codes = row / scale, rounded to the nearest code

A row is the last dimension. scale is float32, [..., 1], so `codes.float() * scale` dequantizes. A
row with a NaN or infinity has codes of 0 and a NaN scale, so it is entirely NaN. A row whose scale
would be below 1e-38, such as one of zeros, has codes of 0.
"""

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["QuantizedRows"]

QuantizedRows = tuple[Tensor, Tensor]  # codes and scale

ROW_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROW_FORMATS = {dtype: name for name, dtype in ROW_CODES.items()}
LARGEST = {"int8": 127.0, "fp8": 448.0}  # largest code
SMALLEST = 1e-38  # smallest scale; its inverse is finite


class PickledCodes:
    """Pickles fp8 codes as bytes: pickle cannot write torch's float8 tensors."""

    def __getstate__(self) -> dict[str, Any]:
        return as_bytes(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(as_codes(state))


def as_bytes(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same values, fp8 tensors as pairs (dtype, bytes)."""
    fp8 = {n: t for n, t in tensors.items() if getattr(t, "dtype", None) == ROW_CODES["fp8"]}
    return tensors | {name: (t.dtype, t.view(torch.uint8)) for name, t in fp8.items()}


def as_codes(values: dict[str, Any]) -> dict[str, Any]:
    """Undoes as_bytes; values without such pairs stay as they are."""
    pairs = {name: value for name, value in values.items() if type(value) is tuple}
    return values | {name: codes.view(dtype) for name, (dtype, codes) in pairs.items()}


def pair_of(op: str, x: QuantizedRows) -> QuantizedRows:
    """x, after checking that it is (codes, scale)."""
    is_sequence = isinstance(x, tuple | list)
    if is_sequence and len(x) == 2 and all(isinstance(t, Tensor) for t in x):
        return x[0], x[1]
    got = [type(t).__name__ for t in x] if is_sequence else type(x).__name__
    raise TypeError(f"{op}: x must be a tensor or a pair (codes, scale), got {got}")


def check_is_name(op: str, output_format: object) -> None:
    """Raises for a torch.dtype, say; the operators check the name."""
    if not isinstance(output_format, str):
        raise TypeError(f"{op}: output_format must be None, 'int8' or 'fp8', got {output_format!r}")


def quantized_rows_reference(rows: Tensor, format: str) -> QuantizedRows:
    """Quantizes rows, in float32: codes, and scale [..., 1]."""
    codes, scale = rounded_codes(rows.to(torch.float32), format)
    return codes.nan_to_num(0).to(ROW_CODES[format]).contiguous(), scale.contiguous()


def rounded_codes(rows: Tensor, format: str) -> QuantizedRows:
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
