"""Cross entropy's benchmark rows on a GPU.

Large rows use the device's clock. The host's launches dominate rows with few tokens and classes, so
these use the host's clock. Their forward is also timed as a CUDA graph. The graph excludes Liger,
which waits for the device to count the targets.
"""

from dataclasses import replace

import torch

from benchmarks.harness.case import FORWARD, TRAINING, Case, Operation
from benchmarks.operators.cross_entropy.linear import LINEAR
from benchmarks.operators.cross_entropy.operations import IN_FORWARD, PLAIN
from benchmarks.operators.cross_entropy.peers import PEERS

LARGE, MIDDLE = (8192, 131072), (8192, 32000)
HEAD = (8192, 4096, 131072)
SMALL, SMALL_HEAD = ((1, 1024), (16, 1024), (64, 1024)), ((1, 1024, 1024), (64, 1024, 1024))


def with_peers(operation: Operation) -> Operation:
    peers = PEERS[operation.name.partition(",")[0]]
    return replace(operation, contenders=operation.contenders | peers)


def case(operation: Operation, mode: str, shape: tuple[int, ...], clock: str) -> Case:
    left_out = ("torch", "liger") if clock == "graph" else ("torch",)  # "torch" is eager's lines
    only = tuple(name for name in operation.contenders if name not in left_out)
    return Case(operation, mode, torch.bfloat16, shape, only, clock)


LOGITS, LOGITS_IN_FORWARD, HEADS = (with_peers(op) for op in (PLAIN, IN_FORWARD, LINEAR))
SEPARATE = case(LOGITS, TRAINING, LARGE, "device")
TOGETHER = case(LOGITS_IN_FORWARD, TRAINING, LARGE, "device")
FUSED = case(HEADS, TRAINING, HEAD, "device")
FURTHER = [
    case(LOGITS, FORWARD, LARGE, "device"),
    case(LOGITS, TRAINING, MIDDLE, "device"),
    case(HEADS, FORWARD, HEAD, "device"),
]
FEW = [
    *((LOGITS, shape) for shape in SMALL),
    *((HEADS, shape) for shape in SMALL_HEAD),
]
CALLED = [case(op, mode, shape, "host") for mode in (FORWARD, TRAINING) for op, shape in FEW]
REPLAYED = [case(op, FORWARD, shape, "graph") for op, shape in FEW]

GPU_ROWS = [SEPARATE, TOGETHER, FUSED, *CALLED, *FURTHER, *REPLAYED]
