"""The gated activations' functions and modules for the memory-growth tests in tests/growth."""

from growth.subject import BF16, ROWS, N, coded, leaf, nn_module, of, two

from fusedops import functional as F
from fusedops import nn

X = (ROWS, N)

OPERATORS = {
    "swiglu": lambda: of(F.swiglu, X, X),
    "swiglu, packed": lambda: of(F.swiglu, X, limit=7.0, alpha=1.702, up_offset=1.0),
    "swiglu, int8": lambda: coded(lambda *args: F.swiglu(*args, output_format="int8"), X, X),
    "geglu": lambda: of(F.geglu, X, X),
    "geglu, packed": lambda: of(F.geglu, X, approximate="tanh", dtype=BF16),
}  # fmt: skip

MODULES = {
    "GEGLU": lambda: nn_module(nn.GEGLU(), two),
    "SwiGLU": lambda: nn_module(nn.SwiGLU(limit=7.0), lambda: [leaf(ROWS, 2 * N)]),
}
