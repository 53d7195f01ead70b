"""Launches of the Triton scaled_copy kernel, and memory accesses required of its machine code."""

import torch

from checks.machine_code.gates import Demand
from fusedops.triton.scaled_copy import scaled_copy_forward


def calls(quick):
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        x = torch.empty(4096, dtype=dtype)
        yield f"forward, {dtype}", "n = 4096", lambda x=x: scaled_copy_forward(x, 0.5)


def demand(launch):
    """A vector of 16 bytes of each tensor, where a thread has that much."""
    size = 2 if launch.types["y"] == "*bf16" else 4
    vectors = launch.constants["BLOCK"] * size // (16 * 32 * launch.num_warps)
    return Demand(loads=vectors, stores=vectors)
