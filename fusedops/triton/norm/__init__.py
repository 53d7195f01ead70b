"""Triton layer_norm and rms_norm of h = residual + dropout(x), or of x.

Formulas: functional/norm.py. A program holds a tile of ROWS rows by BLOCK columns. Rows that fit in
BLOCK stay in registers between their statistics and their output, so global traffic is the minimum.
A program reads a longer row (LOOP) twice, block by block. A row's result does not depend on the
number of rows.
"""

from fusedops.triton.norm.backward import norm_backward
from fusedops.triton.norm.forward import norm_forward, norm_quantized

__all__ = ["norm_backward", "norm_forward", "norm_quantized"]
