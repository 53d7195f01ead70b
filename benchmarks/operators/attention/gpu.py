"""Attention's benchmark rows and goals on a GPU, in bfloat16."""

import torch

from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, Operation
from benchmarks.harness.goals import GpuGoal
from benchmarks.operators.attention.operations import CAUSAL, DECODE, FULL

BF16, HEADS = torch.bfloat16, 16
LENGTHS = (1024, 2048, 4096, 8192)
REACHED = {FORWARD: (350, 450, 500, 530), BACKWARD: (200, 300, 380, 420)}  # TFLOP/s
DECODE_SHAPE = (32, 32, 8, 1, 4096, 128)
DECODE_MS = 32 * 8 * 4096 * 128 * 2 * 2 / 3.6e12 * 1e3  # k and v at 3.6 TB/s


def row(operation: Operation, mode: str, shape: tuple[int, ...]) -> Case:
    return Case(operation, mode, BF16, shape, clock="device")


def of_length(tokens: int) -> tuple[int, ...]:
    return (16384 // tokens, HEADS, HEADS, tokens, tokens, 128)


GPU_MUST_SHOW = [
    *(
        GpuGoal(row(CAUSAL, mode, of_length(tokens)), {"sdpa": 1.0}, tflop_per_s=reached)
        for mode, all_reached in REACHED.items()
        for tokens, reached in zip(LENGTHS, all_reached, strict=True)
    ),
    GpuGoal(row(DECODE, FORWARD, DECODE_SHAPE), {"sdpa": 1.0}, ms=DECODE_MS),
]
GPU_ROWS = [
    *(ask.case for ask in GPU_MUST_SHOW),
    *(row(CAUSAL, TRAINING, of_length(tokens)) for tokens in LENGTHS),
    row(FULL, FORWARD, of_length(4096)),
]
GPU_FIRST = [
    *(row(CAUSAL, mode, of_length(tokens)) for tokens in (4096, 1024) for mode in REACHED),
    row(DECODE, FORWARD, DECODE_SHAPE),
]
