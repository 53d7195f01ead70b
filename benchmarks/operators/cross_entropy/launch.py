"""Benchmarks of small-batch calls of the cross-entropy operators, as functions and as modules."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import fusedops
import fusedops.functional as ours
from benchmarks.harness.case import Contender, Operation, Run
from benchmarks.operators.cross_entropy.linear import LINEAR
from benchmarks.operators.cross_entropy.log_probs import LOG_PROBS, fused, reference
from benchmarks.operators.cross_entropy.operations import PLAIN


def of_tokens(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """That many tokens of a model this wide, with as many classes."""
    tokens, hidden = shape
    return LINEAR.inputs((tokens, hidden, hidden), dtype, device)


def through(module: type) -> Contender:
    """Returns a call of the module: its arguments are the loss's options only."""
    return Contender(lambda *inputs: partial(module(), *inputs))


def through_linear(module: type) -> Callable[..., Run]:
    def prepare(x: Tensor, weight: Tensor, target: Tensor) -> Run:
        loss = module(weight.shape[1], weight.shape[0])
        loss.linear.weight = weight
        return partial(loss, x, target)

    return prepare


def launch(operation: Operation, modules: dict[str, Contender], **other) -> Operation:
    """Eager, torch.ops, the short path, and the modules, without a dtype."""

    def call(function: Callable[..., Tensor]) -> Contender:
        return Contender(lambda *inputs: partial(function, *inputs))

    rows = {
        "eager": operation.contenders["eager"],
        "fusedops torch.ops": call(getattr(torch.ops.fusedops, operation.name)),
        "fusedops functional": call(getattr(ours, operation.name)),
    }
    return replace(operation, contenders=rows | modules, **other)


LOGITS_MODULES = {
    "eager module": through(torch.nn.CrossEntropyLoss),
    "fusedops module": through(fusedops.nn.CrossEntropyLoss),
}
LINEAR_MODULES = {
    "fusedops module": Contender(through_linear(fusedops.nn.LinearCrossEntropyLoss)),
}
if hasattr(torch.nn, "LinearCrossEntropyLoss"):
    theirs = Contender(through_linear(torch.nn.LinearCrossEntropyLoss))
    LINEAR_MODULES = {"eager module": theirs} | LINEAR_MODULES
LOG_PROBS_CALLS = {
    "eager": Contender(lambda *inputs: partial(reference, *inputs)),
    "fusedops functional": Contender(fused),
}
LAUNCH = [
    launch(PLAIN, LOGITS_MODULES),
    launch(LINEAR, LINEAR_MODULES, inputs=of_tokens),
    replace(LOG_PROBS, contenders=LOG_PROBS_CALLS, inputs=of_tokens),
]
