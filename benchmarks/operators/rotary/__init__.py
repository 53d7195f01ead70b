"""Rotary-embedding benchmarks against Hugging Face code, torch.compile and, on GPUs, Liger.

Memory-bound: the figure that matters is the fraction of copy bandwidth, for the fewest bytes that
must move. A shape is batch, query heads, key heads, positions and head width.
"""

import torch

from benchmarks.harness.case import FORWARD, TRAINING
from benchmarks.harness.goals import Goal
from benchmarks.operators.rotary.gpu import GPU_ROWS
from benchmarks.operators.rotary.launch import LAUNCH
from benchmarks.operators.rotary.operations import OPERATIONS, PROJECTED, ROTARY

__all__ = [
    "GPU_ROWS",
    "LAUNCH",
    "MUST_SHOW",
    "OPERATIONS",
    "QUICK_SHAPES",
    "SHAPES",
]

LLAMA_8B = (1, 32, 8, 2048, 128)
SHAPES = [(1, 32, 8, 1, 128), (8, 32, 8, 1, 128), (2, 12, 12, 512, 64), LLAMA_8B]
QUICK_SHAPES = [(1, 32, 8, 1, 128), (2, 12, 12, 512, 64)]

BF16, HF = torch.bfloat16, "huggingface"
MUST_SHOW = [
    Goal(ROTARY, FORWARD, BF16, LLAMA_8B, HF, {"default": 4.0, "keep": 4.0}, 0.6),
    Goal(ROTARY, TRAINING, BF16, LLAMA_8B, HF, {"default": 3.0, "keep": 3.0}),
    Goal(PROJECTED, FORWARD, BF16, LLAMA_8B, HF, {"default": 4.0, "keep": 4.0}),
    Goal(PROJECTED, TRAINING, BF16, LLAMA_8B, HF, {"default": 3.0, "keep": 3.0}),
    Goal(ROTARY, FORWARD, BF16, (1, 32, 8, 1, 128), HF, {"default": 4.0}),
]
