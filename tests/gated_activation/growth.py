"""Quantized swiglu and the modules for the memory-growth tests in tests/growth."""

from growth.subject import ROWS, N, coded, leaf, nn_module, two

from fusedops import functional as F
from fusedops import nn

X = (ROWS, N)

OPERATORS = {
    "swiglu, int8": lambda: coded(lambda *args: F.swiglu(*args, output_format="int8"), X, X),
}

MODULES = {
    "GEGLU": lambda: nn_module(nn.GEGLU(), two),
    "SwiGLU": lambda: nn_module(nn.SwiGLU(limit=7.0), lambda: [leaf(ROWS, 2 * N)]),
}
