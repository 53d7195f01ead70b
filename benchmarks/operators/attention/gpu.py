"""Attention's benchmark rows on a GPU, in bfloat16."""

import torch

from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, Operation
from benchmarks.operators.attention.operations import CAUSAL, DECODE, FULL

BF16, HEADS = torch.bfloat16, 16
LENGTHS = (1024, 2048, 4096, 8192)
DECODE_SHAPE = (32, 32, 8, 1, 4096, 128)


def row(operation: Operation, mode: str, shape: tuple[int, ...]) -> Case:
    return Case(operation, mode, BF16, shape, clock="device")


def of_length(tokens: int) -> tuple[int, ...]:
    return (16384 // tokens, HEADS, HEADS, tokens, tokens, 128)


GPU_ROWS = [
    *(
        row(CAUSAL, mode, of_length(tokens))
        for mode in (FORWARD, BACKWARD, TRAINING)
        for tokens in LENGTHS
    ),
    row(DECODE, FORWARD, DECODE_SHAPE),
    row(FULL, FORWARD, of_length(4096)),
]
