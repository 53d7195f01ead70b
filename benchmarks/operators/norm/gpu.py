"""The norms' benchmark rows on a GPU.

Large rows are timed forward, backward and both, with the device's clock. The host's launches
dominate rows with few tokens, so these use the host's clock and a graph. Other dtypes, and rows too
long for registers, are timed without torch.compile, which takes long to start.
"""

from dataclasses import replace

import torch

from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, Contender, Operation
from benchmarks.operators.norm.operations import OPERATIONS
from benchmarks.operators.norm.peers import one_layer_norm, peers

ROWS, WIDTHS = 16384, (1024, 2048, 4096, 8192, 16384)
TOKENS, HIDDEN = (1, 16, 64), 4096
LONG = ((512, 65536), (64, 262144))
LAYER_NORM_CALL = "F.layer_norm"


def with_peers(operation: Operation) -> Operation:
    return replace(operation, contenders=operation.contenders | peers(operation.name))


def with_one_call(operation: Operation) -> Operation:
    """Adds one F.layer_norm call, which computes something else."""
    beside = {LAYER_NORM_CALL: Contender(one_layer_norm, checked=False)}
    return replace(operation, contenders=beside | operation.contenders)


def case(operation: Operation, mode: str, shape: tuple[int, int], clock: str) -> Case:
    return Case(operation, mode, torch.bfloat16, shape, clock=clock)


def uncompiled(operation: Operation, mode: str, dtype: torch.dtype, shape: tuple[int, int]) -> Case:
    only = tuple(name for name in operation.contenders if not name.startswith("compile"))
    return Case(operation, mode, dtype, shape, only, clock="device")


EVERY = [with_peers(operation) for operation in OPERATIONS]
LARGE = {
    mode: [case(op, mode, (ROWS, n), "device") for op in EVERY for n in WIDTHS]
    for mode in (FORWARD, BACKWARD, TRAINING)
}
CALLED = [
    case(with_one_call(op), FORWARD, (tokens, HIDDEN), "host") for op in EVERY for tokens in TOKENS
]
TRAINED = [case(op, TRAINING, (tokens, HIDDEN), "host") for op in EVERY for tokens in TOKENS]
FURTHER = [
    uncompiled(op, mode, dtype, shape)
    for op in (EVERY[0], EVERY[-1])
    for mode in (FORWARD, BACKWARD)
    for dtype, shape in [
        (torch.float32, (ROWS, 4096)),
        (torch.float16, (ROWS, 4096)),
        *((torch.bfloat16, shape) for shape in LONG),
    ]
]
REPLAYED = [case(op, FORWARD, (tokens, HIDDEN), "graph") for op in EVERY for tokens in TOKENS]

SMALL = CALLED + REPLAYED + TRAINED
GPU_ROWS = LARGE[FORWARD] + LARGE[BACKWARD] + SMALL + FURTHER + LARGE[TRAINING]
