"""quantized_linear's benchmark rows on a GPU, against bfloat16 eager."""

import torch

from benchmarks.harness.case import FORWARD, Case
from benchmarks.operators.quantized_linear import peers
from benchmarks.operators.quantized_linear.operations import (
    DYNAMIC,
    DYNAMIC_FP8,
    FP8,
    INT4,
    INT8,
    NF4,
    Kind,
    served,
)

BF16, WIDE = torch.bfloat16, 8192
ROWS = (1, 16, 64, 512, 4096)
# On both sides of each threshold in csrc/ops/quantized_linear/gpu_kernel.cpp, which these rows set.
LIMITS = (4, 8, 128, 1024, 2048)
SERVED = {kind: served(kind) for kind in (INT8, DYNAMIC, DYNAMIC_FP8, INT4, NF4, FP8)}


def row(kind: Kind, rows: int) -> Case:
    only = ("eager", "compile(eager)", *peers.of(kind.name), "fusedops")
    return Case(SERVED[kind], FORWARD, BF16, (rows, WIDE, WIDE), only=only, clock="device")


GPU_ROWS = [
    *(row(kind, rows) for kind in SERVED for rows in ROWS),
    *(row(kind, rows) for kind in (INT8, INT4, NF4) for rows in LIMITS),
]
