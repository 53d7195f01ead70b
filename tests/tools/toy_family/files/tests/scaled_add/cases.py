"""Shared helpers for scaled_add tests: arguments, backends, comparison."""

from functools import partial

import torch

from fusedops.functional import scaled_add
from fusedops.functional.scaled_add import scaled_add_reference
from fusedops.testing import backends, check, device_of

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = [name for name in backends("scaled_add") if name != "reference"]


def right(backend, dtype):
    """Whether it rounds bfloat16 as it must: Triton's interpreter truncates it."""
    interpreted = backend == "triton" and device_of(backend).type == "cpu"
    return not (interpreted and dtype == torch.bfloat16)


CASES = [(b, dtype) for b in BACKENDS for dtype in FLOATS if right(b, dtype)]


def inputs(shape, dtype):
    draw = torch.Generator().manual_seed(12)
    return tuple(torch.randn(shape, generator=draw).to(dtype) for _ in range(2))


def compare(backend, args, scale=-0.75):
    """By the yardstick, with both gradients."""
    check(
        partial(scaled_add, scale=scale), partial(scaled_add_reference, scale=scale), args, backend
    )
