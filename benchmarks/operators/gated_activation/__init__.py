"""Gated-activation benchmarks against eager, Hugging Face, torch.compile and, on GPUs, Liger.

Memory-bound: the figure that matters is the fraction of copy bandwidth, for the fewest bytes that
must move. Compare large rows under both allocator settings, as for the norms.
"""

import torch

from benchmarks.harness.case import FORWARD, TRAINING
from benchmarks.harness.goals import Goal
from benchmarks.operators.gated_activation.gpu import GPU_ROWS
from benchmarks.operators.gated_activation.launch import LAUNCH
from benchmarks.operators.gated_activation.operations import OPERATIONS, SWIGLU

__all__ = [
    "GPU_ROWS",
    "LAUNCH",
    "MUST_SHOW",
    "OPERATIONS",
    "QUICK_SHAPES",
    "SHAPES",
]

SHAPES = [(1, 5632), (16, 5632), (512, 2816), (2048, 5632)]  # decode to training
QUICK_SHAPES = [(1, 5632), (512, 2816)]

BF16, F32 = torch.bfloat16, torch.float32
MUST_SHOW = [
    Goal(SWIGLU, TRAINING, BF16, (2048, 5632), "eager", {"default": 2.5, "keep": 2.5}, 0.6),
    Goal(SWIGLU, FORWARD, BF16, (1, 5632), "eager", {"default": 1.0}),
    Goal(SWIGLU, FORWARD, F32, (2, 64), "eager", {"default": 1.0}),
    Goal(SWIGLU, TRAINING, F32, (2, 64), "eager", {"default": 1.0}),
]
