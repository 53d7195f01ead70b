"""The rows of the family on a GPU, and what they must show.

Large rows are timed forward, backward and both, by the device's clock. Few tokens cost what the
host needs to launch them, so they are timed by the host's clock and in a graph.
"""

from dataclasses import replace

import torch

from benchmarks.case import BACKWARD, FORWARD, TRAINING, Case, Contender, Operation
from benchmarks.harness import COPY
from benchmarks.must_show import Ask
from benchmarks.norm.operations import OPERATIONS
from benchmarks.norm.peers import one_layer_norm, peers

ROWS, WIDTHS = 16384, (1024, 2048, 4096, 8192, 16384)
TOKENS, HIDDEN = (1, 16, 64), 4096
LAYER_NORM_CALL = "F.layer_norm"


def with_peers(operation: Operation) -> Operation:
    return replace(operation, contenders=operation.contenders | peers(operation.name))


def with_one_call(operation: Operation) -> Operation:
    """Beside one F.layer_norm call, which computes something else."""
    beside = {LAYER_NORM_CALL: Contender(one_layer_norm, checked=False)}
    return replace(operation, contenders=beside | operation.contenders)


def case(operation: Operation, mode: str, shape: tuple[int, int], clock: str) -> Case:
    return Case(operation, mode, torch.bfloat16, shape, clock=clock)


def rivals(operation: Operation) -> list[str]:
    """Whom every row must beat: torch.compile and Liger."""
    return [name for name in operation.contenders if name.startswith(("compile", "liger"))]


EVERY = [with_peers(operation) for operation in OPERATIONS]
LARGE = {
    mode: [case(op, mode, (ROWS, n), "device") for op in EVERY for n in WIDTHS]
    for mode in (FORWARD, BACKWARD, TRAINING)
}
CALLED = [
    case(with_one_call(op), FORWARD, (tokens, HIDDEN), "host") for op in EVERY for tokens in TOKENS
]
TRAINED = [case(op, TRAINING, (tokens, HIDDEN), "host") for op in EVERY for tokens in TOKENS]
REPLAYED = [case(op, FORWARD, (tokens, HIDDEN), "graph") for op in EVERY for tokens in TOKENS]

# What is asked comes first: a run that is cut short keeps the rows that it has.
GPU_ROWS = LARGE[FORWARD] + LARGE[BACKWARD] + CALLED + LARGE[TRAINING] + REPLAYED + TRAINED

OF_COPY = {FORWARD: {COPY: 0.95}, BACKWARD: {COPY: 0.84}, TRAINING: {}}
GPU_MUST_SHOW = [
    Ask(row, OF_COPY[mode] | dict.fromkeys(rivals(row.operation), 1.0))
    for mode, rows in LARGE.items()
    for row in rows
] + [
    Ask(row, {LAYER_NORM_CALL: 1.0} | dict.fromkeys(rivals(row.operation), 1.5), launches=1)
    for row in CALLED
]
