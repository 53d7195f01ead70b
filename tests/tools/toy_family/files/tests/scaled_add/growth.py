"""scaled_add's function and module for the memory-growth tests in tests/growth."""

from growth.subject import BF16, ROWS, N, of, of_module, two

from fusedops import functional as F
from fusedops import nn

X = (ROWS, N)
OPERATORS = {
    "scaled_add": lambda: of(F.scaled_add, X, X, scale=0.5),
    "scaled_add, bfloat16": lambda: of(F.scaled_add, X, X, scale=-2.0, dtype=BF16),
}
MODULES = {"ScaledAdd": lambda: of_module(nn.ScaledAdd(0.5), two)}
