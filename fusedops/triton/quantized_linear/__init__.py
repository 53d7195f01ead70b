"""Triton quantized_linear and dequantize_weight, for weights of 8 or 4 bits.

Formats and formulas: functional/quantized_linear.py. Matmuls of codes by codes use them as they
are. Others dequantize the weight tile by tile, or store it dequantized in calls with so many rows
that it pays (`scratch`). Sums have a fixed order, without atomics, so the same call gives the same
bits each time.
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
