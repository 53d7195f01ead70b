"""What the machine itself reaches, measured in the run that refers to it."""

from contextlib import nullcontext

import torch

from benchmarks.harness import copy_of
from benchmarks.timing import Machine, interleaved
from fusedops.measure import spread

COPY_BYTES, MATMUL_SIZE = 4 << 30, 8192


def ceilings(
    machine: Machine,
    budget_s: float = 2.0,
    copy_bytes: int = COPY_BYTES,
    matmul_size: int = MATMUL_SIZE,
) -> dict[str, dict]:
    """Device-to-device copy and bfloat16 matrix product, both of random data."""
    a, b = (
        torch.randn(matmul_size, matmul_size, dtype=torch.bfloat16, device=machine.device)
        for _ in range(2)
    )
    calls = {"copy": copy_of(copy_bytes, machine.device), "matmul": lambda: a @ b}
    timed = {name: (call, nullcontext) for name, call in calls.items()}
    seconds = interleaved(timed, budget_s, machine.clocks["device"])
    found = {name: spread(samples)._asdict() for name, samples in seconds.items()}
    flops = 2 * matmul_size**3
    copy, matmul = found["copy"]["median"], found["matmul"]["median"]
    found["copy"] |= {"bytes": copy_bytes, "gb_per_s": copy_bytes / copy / 1e9}
    found["matmul"] |= {"flops": flops, "tflop_per_s": flops / matmul / 1e12}
    return found
