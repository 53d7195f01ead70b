"""The module `Linear` for the memory-growth tests in tests/growth."""

from growth.subject import N, nn_module, rows

from fusedops import nn

MODULES = {
    "Linear": lambda: nn_module(nn.Linear(N, 32), rows),
    "Linear, gelu": lambda: nn_module(nn.Linear(N, 32, activation="gelu"), rows),
}
