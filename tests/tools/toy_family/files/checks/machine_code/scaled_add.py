"""Launches for checking the Triton scaled_add kernel's compiled code."""

from collections.abc import Callable, Iterator

import torch

from checks.machine_code.gates import Demand
from checks.machine_code.launches import Launch
from fusedops.triton.scaled_add import scaled_add_backward, scaled_add_forward


def calls(quick: bool) -> Iterator[tuple[str, str, Callable[[], object]]]:
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        x = torch.empty(4096, dtype=dtype)
        yield f"forward, {dtype}", "n = 4096", lambda x=x: scaled_add_forward(x, x, 0.5)
        yield f"backward, {dtype}", "n = 4096", lambda x=x: scaled_add_backward(x, 0.5)


def demand(launch: Launch) -> Demand:
    """A vector of 16 bytes of each tensor, where a thread has that much."""
    size = 2 if launch.types["y"] == "*bf16" else 4
    vectors = launch.constants["BLOCK"] * size // (16 * 32 * launch.num_warps)
    return Demand(loads=vectors * (1 + launch.constants["SUM"]), stores=vectors)
