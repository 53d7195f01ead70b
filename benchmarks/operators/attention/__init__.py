"""Attention benchmarks against torch's scaled_dot_product_attention and torch.compile.

Compute-bound: the figures that matter are the ratio, and FLOP/s over the visible pairs of query and
key. A decode step is memory-bound: its figure is the fraction of copy bandwidth. A shape is batch,
query heads, key heads, queries, keys and head width.
"""

import torch

from benchmarks.harness.case import FORWARD, TRAINING, Case
from benchmarks.harness.goals import Goal
from benchmarks.operators.attention.gpu import GPU_ROWS
from benchmarks.operators.attention.operations import CAUSAL, DECODE, FULL, LAUNCH, PAGED

__all__ = ["GPU_ROWS", "LAUNCH", "MUST_SHOW", "QUICK_ROWS", "ROWS"]

F32, BF16, SDPA = torch.float32, torch.bfloat16, "sdpa"
BERT, LLAMA, STEP, PAGES = (
    (1, 12, 12, 2048, 2048, 64),
    (1, 8, 8, 4096, 4096, 128),
    (1, 32, 8, 1, 4096, 128),
    (8, 32, 8, 1, 4096, 128),
)

MUST_SHOW = [
    *(Goal(FULL, FORWARD, BF16, shape, SDPA, {"default": 4.2}) for shape in (BERT, LLAMA)),
    *(Goal(CAUSAL, FORWARD, BF16, shape, SDPA, {"default": 4.8}) for shape in (BERT, LLAMA)),
    *(Goal(FULL, FORWARD, F32, shape, SDPA, {"default": 1.3}) for shape in (BERT, LLAMA)),
    Goal(CAUSAL, TRAINING, BF16, BERT, SDPA, {"default": 3.5}),
    Goal(DECODE, FORWARD, BF16, STEP, SDPA, {"default": 30.0}),
]
ROWS = [goal.case() for goal in MUST_SHOW] + [
    Case(CAUSAL, FORWARD, F32, BERT),
    Case(CAUSAL, TRAINING, F32, BERT),
    Case(DECODE, FORWARD, F32, STEP),
    Case(DECODE, FORWARD, BF16, (8, 32, 8, 1, 512, 128)),
    *(Case(PAGED, FORWARD, dtype, PAGES) for dtype in (BF16, F32)),
]
QUICK_ROWS = [
    Case(CAUSAL, FORWARD, BF16, (1, 4, 2, 256, 256, 64)),
    Case(DECODE, FORWARD, BF16, (1, 8, 2, 1, 512, 64)),
    Case(PAGED, FORWARD, BF16, (2, 8, 2, 1, 512, 64)),
]
