"""The rotary embedding's benchmark rows on a GPU.

Large rows are timed forward, backward and both, with the device's clock. The host's launches
dominate rows with few tokens, so these use the host's clock and a graph.
"""

from dataclasses import replace

import torch

from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, Operation
from benchmarks.operators.rotary.operations import OPERATIONS
from benchmarks.operators.rotary.peers import PEERS

LARGE_SHAPES = ((8, 32, 8, 2048, 128), (4, 32, 32, 4096, 64))
SMALL_SHAPES = ((1, 32, 8, 1, 128), (16, 32, 8, 1, 128), (64, 32, 8, 1, 128))


def with_peers(operation: Operation) -> Operation:
    return replace(operation, contenders=operation.contenders | PEERS.get(operation.name, {}))


def case(operation: Operation, mode: str, shape: tuple[int, ...], clock: str) -> Case:
    return Case(operation, mode, torch.bfloat16, shape, clock=clock)


EVERY = [with_peers(operation) for operation in OPERATIONS]
LARGE = {
    mode: [case(op, mode, shape, "device") for op in EVERY for shape in LARGE_SHAPES]
    for mode in (FORWARD, BACKWARD, TRAINING)
}
CALLED = [case(op, FORWARD, shape, "host") for op in EVERY for shape in SMALL_SHAPES]
TRAINED = [case(op, TRAINING, shape, "host") for op in EVERY for shape in SMALL_SHAPES]
REPLAYED = [case(op, FORWARD, shape, "graph") for op in EVERY for shape in SMALL_SHAPES]

GPU_ROWS = LARGE[FORWARD] + LARGE[BACKWARD] + CALLED + LARGE[TRAINING] + REPLAYED + TRAINED
