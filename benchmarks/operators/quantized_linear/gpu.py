"""quantized_linear's benchmark rows and goals on a GPU, against bfloat16 eager."""

import torch

from benchmarks.harness.case import FORWARD, Case
from benchmarks.harness.goals import GpuGoal
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
FEW = {INT8: {1: 1.75}, INT4: {1: 3.0, 16: 2.8}}
# Weight-only formats dequantize for each matmul: what that costs with many rows.
MANY = {64: 0.6, 512: 0.6, 4096: 0.95}
ASKED = [
    *((kind, rows, ratio) for kind, asked in FEW.items() for rows, ratio in asked.items()),
    *((kind, rows, ratio) for kind in (INT8, INT4, NF4) for rows, ratio in MANY.items()),
    *((kind, rows, 0.95) for kind in (DYNAMIC, DYNAMIC_FP8) for rows in (1, 16, 64, 512, 4096)),
]
# On both sides of each threshold in csrc/ops/quantized_linear/gpu_kernel.cpp, which these rows set.
LIMITS = (4, 8, 128, 1024, 2048)
SERVED = {kind: served(kind) for kind in (INT8, DYNAMIC, DYNAMIC_FP8, INT4, NF4, FP8)}


def row(kind: Kind, rows: int) -> Case:
    only = ("eager", "compile(eager)", *peers.of(kind.name), "fusedops")
    return Case(SERVED[kind], FORWARD, BF16, (rows, WIDE, WIDE), only=only, clock="device")


GPU_MUST_SHOW = [GpuGoal(row(kind, rows), {"eager": ratio}) for kind, rows, ratio in ASKED]
GPU_FIRST = [row(INT4, 1), row(INT4, 16), row(INT8, 1)]
GPU_ROWS = [
    *(ask.case for ask in GPU_MUST_SHOW),
    *(row(NF4, rows) for rows in (1, 16)),
    *(row(FP8, rows) for rows in (1, 16, 64, 512, 4096)),
    *(row(kind, rows) for kind in (INT8, INT4, NF4) for rows in LIMITS),
]
