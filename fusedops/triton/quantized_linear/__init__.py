"""quantized_linear: products with a weight of codes, which become numbers in the tiles that are
multiplied. Formats and formulas: functional/quantized_linear.py.

No dequantized weight lies in memory but of a call with so many rows that it pays (`scratch`).
Sums are of one order, without atomics, so that the same call gives the same bits each time.
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
