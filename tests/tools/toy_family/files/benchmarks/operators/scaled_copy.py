"""scaled_copy's benchmark cases and goals, against eager PyTorch."""

from functools import partial

import torch

import fusedops.functional as ours
from benchmarks.harness.case import FORWARD, TRAINING, Case, Contender, Operation
from benchmarks.harness.goals import Goal
from fusedops.references.scaled_copy import scaled_copy_reference

SCALE = 0.5
QUICK_SHAPES = [(1, 4096), (512, 4096)]
SHAPES = [*QUICK_SHAPES, (4096, 4096)]


def inputs(shape, dtype, device):
    return (torch.randn(*shape, dtype=dtype, device=device, requires_grad=True),)


def bytes_moved(mode, x):
    """Forward reads x and writes y; backward reads dy and writes dx."""
    return {FORWARD: 2, TRAINING: 4}[mode] * x.nbytes


COPY = Operation(
    "scaled_copy",
    inputs,
    partial(scaled_copy_reference, scale=SCALE),
    bytes_moved,
    {
        "eager": Contender(lambda x: partial(torch.mul, x, SCALE)),
        "fusedops": Contender(lambda x: partial(ours.scaled_copy, x, SCALE)),
    },
)
OPERATIONS = LAUNCH = [COPY]
MUST_SHOW = [Goal(COPY, FORWARD, torch.bfloat16, (4096, 4096), "eager", {"default": 1.0})]
GPU_ROWS = [Case(COPY, FORWARD, torch.bfloat16, (8192, 8192), clock="device")]
