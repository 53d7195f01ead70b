"""The `linear` function and module for the memory-growth tests in tests/growth."""

import functools

from growth.subject import N, Subject, drawn, nn_module, rows

import fusedops
from fusedops import functional as F
from fusedops import nn


def linear(activation):
    """Returns a subject that runs the kernel even where torch would be faster."""

    def run(x, weight, bias):
        return F.linear(x, weight, bias, activation)

    around = functools.partial(fusedops.backend, "cpu")
    return Subject(run, drawn((8, N), (32, N), (32,)), around=around)


OPERATORS = {
    "linear": lambda: linear(None),
    "linear, gelu": lambda: linear("gelu"),
    "linear, silu": lambda: linear("silu"),
}  # fmt: skip

MODULES = {
    "Linear": lambda: nn_module(nn.Linear(N, 32), rows),
    "Linear, gelu": lambda: nn_module(nn.Linear(N, 32, activation="gelu"), rows),
}
