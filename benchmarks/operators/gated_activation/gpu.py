"""The gated activations' benchmark rows on a GPU.

Large rows are timed forward, backward and both, with the device's clock. The host's launches
dominate rows with few tokens, so these use the host's clock and a graph.
"""

from dataclasses import replace

import torch

from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, Operation
from benchmarks.operators.gated_activation.operations import OPERATIONS
from benchmarks.operators.gated_activation.peers import PEERS

ROWS, WIDTHS = 8192, (2816, 5632, 11008, 14336)
TOKENS, WIDTH = (1, 16, 64), 11008


def with_peers(operation: Operation) -> Operation:
    return replace(operation, contenders=operation.contenders | PEERS.get(operation.name, {}))


def case(operation: Operation, mode: str, shape: tuple[int, int], clock: str) -> Case:
    return Case(operation, mode, torch.bfloat16, shape, clock=clock)


EVERY = [with_peers(operation) for operation in OPERATIONS]
LARGE = {
    mode: [case(op, mode, (ROWS, n), "device") for op in operations for n in WIDTHS]
    for mode, operations in {FORWARD: EVERY, BACKWARD: EVERY, TRAINING: OPERATIONS}.items()
}
CALLED = [case(op, FORWARD, (tokens, WIDTH), "host") for op in EVERY for tokens in TOKENS]
TRAINED = [case(op, TRAINING, (tokens, WIDTH), "host") for op in OPERATIONS for tokens in TOKENS]
REPLAYED = [case(op, FORWARD, (tokens, WIDTH), "graph") for op in EVERY for tokens in TOKENS]

GPU_ROWS = LARGE[FORWARD] + LARGE[BACKWARD] + CALLED + LARGE[TRAINING] + REPLAYED + TRAINED
