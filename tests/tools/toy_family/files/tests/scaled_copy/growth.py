"""scaled_copy's function and module for the memory-growth tests in tests/growth."""

from growth.subject import ROWS, N, of, nn_module, rows

from fusedops import functional as F
from fusedops import nn

OPERATORS = {"scaled_copy": lambda: of(F.scaled_copy, (ROWS, N), scale=0.5)}
MODULES = {"ScaledCopy": lambda: nn_module(nn.ScaledCopy(0.5), rows)}
