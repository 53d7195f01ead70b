"""Cross-entropy benchmarks against torch, Hugging Face, torch.compile, TRL and, on GPUs, Liger.

Cross entropy of logits is memory-bound: the figure that matters is the fraction of copy bandwidth.
With the head's matmul it is compute-bound, and it saves memory: about four times the logits. Shapes
are (rows, classes), and (rows, hidden, classes).
"""

import torch

from benchmarks.harness.case import FORWARD, TRAINING, Case, Operation
from benchmarks.harness.goals import Goal
from benchmarks.operators.cross_entropy.gpu import GPU_ROWS
from benchmarks.operators.cross_entropy.launch import LAUNCH
from benchmarks.operators.cross_entropy.linear import FROZEN, IGNORING, LINEAR
from benchmarks.operators.cross_entropy.log_probs import LOG_PROBS
from benchmarks.operators.cross_entropy.operations import CAPPED, IN_FORWARD, PLAIN, SMOOTHED

__all__ = ["GPU_ROWS", "LAUNCH", "MUST_SHOW", "QUICK_ROWS", "ROWS"]

LLAMA_2, LLAMA_3, FEW = (1024, 32000), (256, 128256), (8, 32000)
HEAD, NARROW_BATCH = (2048, 512, 32000), (512, 1024, 32000)
OF_COMPLETIONS = (512, 1024, 32768)

BF16, F32, HF = torch.bfloat16, torch.float32, "huggingface"


# Left out of calls that take seconds: the first row already shows the result.
SHOWN = ("torch", "torch chunked")


def row(
    operation: Operation,
    mode: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    without: tuple[str, ...] = (),
) -> Case:
    """In float32, Hugging Face's copy is none, and its code is eager's."""
    without += (HF,) if dtype == F32 else ()
    only = tuple(name for name in operation.contenders if name not in without)
    return Case(operation, mode, dtype, shape, only)


ROWS = [
    row(PLAIN, mode, dtype, shape)
    for mode in (FORWARD, TRAINING)
    for dtype in (F32, BF16)
    for shape in (FEW, LLAMA_2, LLAMA_3)
]
ROWS += [row(IN_FORWARD, TRAINING, dtype, LLAMA_2) for dtype in (F32, BF16)]
ROWS += [
    row(operation, mode, dtype, LLAMA_2)
    for operation in (SMOOTHED, CAPPED)
    for mode in (FORWARD, TRAINING)
    for dtype in (F32, BF16)
]
ROWS += [row(LINEAR, TRAINING, dtype, HEAD) for dtype in (F32, BF16)]
ROWS += [row(LINEAR, TRAINING, dtype, NARROW_BATCH, SHOWN) for dtype in (F32, BF16)]
ROWS += [row(operation, TRAINING, BF16, HEAD, SHOWN) for operation in (FROZEN, IGNORING)]
ROWS += [
    row(LOG_PROBS, mode, dtype, OF_COMPLETIONS)
    for mode in (FORWARD, TRAINING)
    for dtype in (F32, BF16)
]

QUICK_ROWS = [row(PLAIN, mode, dtype, FEW) for mode in (FORWARD, TRAINING) for dtype in (F32, BF16)]
QUICK_ROWS += [row(LINEAR, TRAINING, BF16, (64, 128, 4000))]

MUST_SHOW = [
    Goal(PLAIN, TRAINING, BF16, LLAMA_2, HF, {"default": 6.0}),
    Goal(LINEAR, TRAINING, BF16, HEAD, HF, {"default": 1.0, "keep": 1.0}, of_memory=0.1),
]
MUST_SHOW += [
    Goal(LOG_PROBS, TRAINING, dtype, OF_COMPLETIONS, "trl", {"default": 1.0}, of_memory=0.5)
    for dtype in (F32, BF16)
]
