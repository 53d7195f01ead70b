"""The module ScaledCopy for the memory-growth tests in tests/growth."""

from growth.subject import nn_module, rows

from fusedops import nn

MODULES = {"ScaledCopy": lambda: nn_module(nn.ScaledCopy(0.5), rows)}
