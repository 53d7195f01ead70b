"""Norm benchmarks against eager, Hugging Face, torch.compile, and Liger, Apex and QuACK on GPUs.

Memory-bound: the figure that matters is the fraction of copy bandwidth, for the fewest bytes that
must move. On a CPU, page faults of fresh memory dominate large outputs (a [4096, 4096] float32 add
takes 33 ms, 5 of them for the add), for every contender alike: compare those rows under both
allocator settings.
"""

import torch

from benchmarks.harness.case import FORWARD, TRAINING
from benchmarks.harness.goals import Goal
from benchmarks.operators.norm.gpu import GPU_ROWS
from benchmarks.operators.norm.launch import LAUNCH
from benchmarks.operators.norm.operations import ADD_LAYER_NORM, ADD_RMS_NORM, OPERATIONS

__all__ = [
    "GPU_ROWS",
    "LAUNCH",
    "MUST_SHOW",
    "OPERATIONS",
    "QUICK_SHAPES",
    "SHAPES",
]

SHAPES = [(1, 4096), (16, 4096), (512, 1024), (2048, 1024), (4096, 4096)]  # decode to training
QUICK_SHAPES = [(1, 4096), (512, 1024)]

BF16, F32 = torch.bfloat16, torch.float32
MUST_SHOW = [
    Goal(
        ADD_RMS_NORM,
        TRAINING,
        BF16,
        (2048, 1024),
        "huggingface",
        {"default": 6.0, "keep": 5.0},
        0.5,
    ),
    Goal(ADD_RMS_NORM, TRAINING, F32, (2048, 1024), "huggingface", {"default": 4.0, "keep": 4.0}),
    Goal(ADD_LAYER_NORM, TRAINING, BF16, (2048, 1024), "eager", {"default": 2.0, "keep": 2.0}),
    Goal(ADD_RMS_NORM, FORWARD, BF16, (1, 4096), "huggingface", {"default": 3.0}),
    Goal(ADD_LAYER_NORM, FORWARD, F32, (2, 64), "eager", {"default": 1.0}),
    Goal(ADD_LAYER_NORM, TRAINING, F32, (2, 64), "eager", {"default": 1.0}),
]
