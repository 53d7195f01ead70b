"""Triton quantized_linear: matmuls that dequantize the weight tile by tile.

Formats and formulas: functional/quantized_linear.py. The dequantized weight is stored only for
calls with so many rows that it pays (`scratch`). Sums have a fixed order, without atomics, so the
same call gives the same bits each time.
"""

from fusedops.triton.quantized_linear.backward import quantized_linear_backward
from fusedops.triton.quantized_linear.dequantize import dequantize_weight
from fusedops.triton.quantized_linear.forward import (
    quantized_linear_forward,
    quantized_linear_tiles,
)

__all__ = [
    "dequantize_weight",
    "quantized_linear_backward",
    "quantized_linear_forward",
    "quantized_linear_tiles",
]
