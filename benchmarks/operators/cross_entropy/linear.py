"""linear_cross_entropy's benchmark contenders: torch, Hugging Face, torch.compile and fusedops.

Compute-bound: three matmuls. torch has had the function since 2.13, and splits the batch into
chunks if it gets options.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Contender, Operation, Run, find
from benchmarks.operators.cross_entropy.operations import contenders
from fusedops.references.cross_entropy import linear_cross_entropy_reference

IGNORED = -100


def tensors(frozen: bool, ignored: float) -> Callable[..., tuple[Tensor, ...]]:
    """Draws x, the head's weight, and targets. Some targets are ignored."""

    def inputs(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        rows, hidden, classes = shape
        x = torch.randn(rows, hidden, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(classes, hidden, dtype=dtype, device=device) / hidden**0.5
        target = torch.randint(classes, (rows,), device=device)
        target[torch.randperm(rows, device=device)[: int(ignored * rows)]] = IGNORED
        return x, torch.nn.Parameter(weight, requires_grad=not frozen), target

    return inputs


def bytes_moved(mode: str, x: Tensor, weight: Tensor, target: Tensor) -> int:
    """Forward reads both; backward reads them again and writes the requested gradients."""
    read = x.nbytes + weight.nbytes
    written = sum(t.nbytes for t in (x, weight) if t.requires_grad)
    return {FORWARD: read, BACKWARD: read + written, TRAINING: 2 * read + written}[mode]


def flops(mode: str, x: Tensor, weight: Tensor, target: Tensor) -> int:
    """Counts one matmul for the logits and one per gradient, over the rows that count."""
    product = 2 * int((target != IGNORED).sum()) * weight.numel()
    backward = sum(t.requires_grad for t in (x, weight))
    return product * {FORWARD: 1, BACKWARD: backward, TRAINING: 1 + backward}[mode]


# Code as it is in models.


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def huggingface(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def torchs_own(chunked: bool) -> Contender:
    """In as many chunks as its options choose, or with all logits."""

    def prepare(x: Tensor, weight: Tensor, target: Tensor) -> Run:
        function = find("torch.nn.functional", "linear_cross_entropy")
        arguments = {"options": find("torch.nn", "LinearCrossEntropyOptions")()} if chunked else {}
        return partial(function, x, weight, target, **arguments)

    return Contender(prepare)


def operation(name: str, frozen: bool = False, ignored: float = 0.0) -> Operation:
    fused = partial(ours.linear_cross_entropy, dtype=torch.float32)
    rows = contenders(eager, huggingface, fused)
    own = {"torch": torchs_own(chunked=False), "torch chunked": torchs_own(chunked=True)}
    return Operation(
        name,
        tensors(frozen, ignored),
        partial(linear_cross_entropy_reference, dtype=torch.float32),
        bytes_moved,
        {"eager": rows.pop("eager")} | own | rows,
        flops,
    )


LINEAR = operation("linear_cross_entropy")
FROZEN = operation("linear_cross_entropy, frozen weight", frozen=True)
IGNORING = operation("linear_cross_entropy, half ignored", ignored=0.5)
