"""Shared helpers for linear tests: arguments, layouts, backends."""

import torch
import torch.nn.functional as F

from fusedops.functional import linear
from fusedops.references.linear import ACTIVATIONS, linear_reference
from fusedops.testing import backends, check

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
KINDS = list(ACTIVATIONS)
BACKENDS = [name for name in backends("linear") if name != "reference"]
CASES = [(kind, name) for kind in KINDS for name in BACKENDS]

TORCHS = {  # torch's own activations
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}

LAYOUTS = {  # of a matrix [m, n] that `make` gives
    "transposed": lambda make, m, n: make(n, m).t(),
    "slice of rows": lambda make, m, n: make(m, n + 7)[:, 3:-4],
    "every second column": lambda make, m, n: make(m, 2 * n)[:, ::2],
    "every second row": lambda make, m, n: make(2 * m, n)[::2],
    "one row expanded": lambda make, m, n: make(1, n).expand(m, n),
    "one column expanded": lambda make, m, n: make(m, 1).expand(m, n),
    "misaligned": lambda make, m, n: make(m * n + 1)[1:].view(m, n),
}


def inputs(shape, features, dtype, bias=True):
    """Returns input, weight and bias, scaled so that results are near 1."""
    draw = torch.Generator().manual_seed(12)
    depth = shape[-1]
    x = torch.randn(shape, generator=draw) + 0.25
    weight = torch.randn(features, depth, generator=draw) / max(depth, 1) ** 0.5
    shift = torch.randn(features, generator=draw) if bias else None
    return x.to(dtype), weight.to(dtype), None if shift is None else shift.to(dtype)


def compare(kind, backend, args):
    check(linear, linear_reference, args, backend, activation=kind)
