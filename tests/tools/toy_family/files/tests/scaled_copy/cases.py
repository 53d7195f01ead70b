"""Shared helpers for scaled_copy tests: the argument, the backends."""

import torch
from contract.interpreter import interpreted

from fusedops.testing import backends

BACKENDS = [name for name in backends("scaled_copy") if name != "reference"]
CASES = [
    (backend, dtype)
    for backend in BACKENDS
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not (interpreted(backend) and dtype == torch.bfloat16)  # it truncates
]


def drawn(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(12)).to(dtype)
