"""Formats of quantized rows (8-bit codes with one scale per row).

    scale = max |row| / largest         largest: 127 for int8, 448 for fp8 (float8_e4m3fn)
    codes = row / scale, rounded to the nearest code

A row is the last dimension. scale is float32, [..., 1], so `codes.float() * scale` dequantizes. A
row with a NaN or infinity has codes of 0 and a NaN scale, so it is entirely NaN. A row whose scale
would be below 1e-38, such as one of zeros, has codes of 0.
"""

from typing import Any

import torch
from torch import Tensor

from fusedops.references.quantized_rows import ROW_CODES

__all__ = ["QuantizedRows"]

QuantizedRows = tuple[Tensor, Tensor]  # codes and scale

ROW_FORMATS = {dtype: name for name, dtype in ROW_CODES.items()}


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
