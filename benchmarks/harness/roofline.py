"""Measures a device's copy bandwidth and bfloat16 matmul speed, as limits for the results."""

import math
from contextlib import nullcontext

import torch

from benchmarks.harness.run import copy_of
from benchmarks.harness.timing import Call, Machine, interleaved
from fusedops.measuring.ratios import spread

COPY_BYTES, MATMUL_SIZE = 4 << 30, 8192
IN_QUEUE = 500  # at about 1000 launches the driver makes the host wait


def ceilings(
    machine: Machine,
    budget_s: float = 2.0,
    copy_bytes: int = COPY_BYTES,
    matmul_size: int = MATMUL_SIZE,
) -> dict[str, dict]:
    """Device-to-device copy and bfloat16 matmul, both with random data."""
    product = matmul(matmul_size, machine.device)
    calls = {"copy": copy_of(copy_bytes, machine.device), "matmul": product}
    timed = {name: (call, nullcontext) for name, call in calls.items()}
    seconds = interleaved(timed, budget_s, machine.clocks["device"])
    peaks = {name: spread(samples)._asdict() for name, samples in seconds.items()}
    flops = 2 * matmul_size**3
    copy_s, matmul_s = peaks["copy"]["median"], peaks["matmul"]["median"]
    peaks["copy"] |= {"bytes": copy_bytes, "gb_per_s": copy_bytes / copy_s / 1e9}
    peaks["matmul"] |= {"size": matmul_size, "flops": flops, "tflop_per_s": flops / matmul_s / 1e12}
    return peaks


def keep_busy(machine: Machine, peaks: dict[str, dict], seconds: float = 0.5) -> None:
    """Queues `seconds` of matmuls on the device, and returns while they run."""
    product = matmul(peaks["matmul"]["size"], machine.device)
    for _ in range(min(IN_QUEUE, math.ceil(seconds / peaks["matmul"]["median"]))):
        product()


def matmul(size: int, device: torch.device) -> Call:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return lambda: a @ b
