"""scaled_add's benchmarks against eager and torch.compile. A copy's bandwidth is the limit."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import fusedops
import fusedops.functional as ours
from benchmarks.harness.case import (
    FORWARD,
    TRAINING,
    Case,
    Contender,
    Operation,
    compiled,
)
from benchmarks.harness.goals import Goal, GpuGoal
from fusedops.functional.scaled_add import scaled_add_reference

SCALE = 0.5
SHAPES = [(1, 4096), (512, 4096), (4096, 4096)]
QUICK_SHAPES = [(1, 4096), (512, 4096)]


def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(*shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2)
    )


def bytes_moved(mode: str, x: Tensor, residual: Tensor) -> int:
    """Forward reads x and residual and writes y; backward reads dy and writes dresidual."""
    return {FORWARD: 3, TRAINING: 5}[mode] * x.nbytes


def eager(x: Tensor, residual: Tensor) -> Tensor:
    return x + SCALE * residual


LINES = Contender(lambda *tensors: partial(eager, *tensors))
FUSED = Contender(lambda *tensors: partial(ours.scaled_add, *tensors, SCALE))
SUM = Operation(
    "scaled_add",
    inputs,
    partial(scaled_add_reference, scale=SCALE),
    bytes_moved,
    {"eager": LINES, "compile(eager)": compiled(LINES), "fusedops": FUSED},
)
OPERATIONS = [SUM]

MODULE = Contender(lambda *tensors: partial(fusedops.nn.ScaledAdd(SCALE), *tensors))
LAUNCH = [replace(SUM, contenders={"eager": LINES, "fusedops": FUSED, "fusedops module": MODULE})]

BF16 = torch.bfloat16
MUST_SHOW = [Goal(SUM, FORWARD, BF16, (4096, 4096), "eager", {"default": 1.2, "keep": 1.2})]
GPU_ROWS = [Case(SUM, FORWARD, BF16, (8192, 8192), clock="device")]
GPU_MUST_SHOW = [GpuGoal(row, {"eager": 1.2}) for row in GPU_ROWS]
