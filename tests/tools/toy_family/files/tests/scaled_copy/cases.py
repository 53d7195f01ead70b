"""Shared helpers for scaled_copy tests: the argument, the backends."""

import torch

from fusedops.testing import backends, device_of

BACKENDS = [name for name in backends("scaled_copy") if name != "reference"]
CASES = [
    (backend, dtype)
    for backend in BACKENDS
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    # Triton's interpreter truncates when it stores bfloat16.
    if (backend, device_of(backend).type, dtype) != ("triton", "cpu", torch.bfloat16)
]


def drawn(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(12)).to(dtype)
