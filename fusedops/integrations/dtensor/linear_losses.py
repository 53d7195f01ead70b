"""DTensor handlers of linear_cross_entropy, and sharding rules of linear_log_probs.

linear_cross_entropy may be sharded over rows, the vocabulary, or both; linear_log_probs over rows.
A rank with a part of the vocabulary multiplies with its part of the weight only. For the gradients
the weight gets one row of zeros more, with a bias of minus infinity: the target of the rows whose
target is on another rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fusedops.integrations.dtensor.local import to_dtensor
from fusedops.integrations.dtensor.losses import (
    IGNORED,
    NONE,
    ROWS,
    Problem,
    all_losses,
    check_targets,
    local_targets,
    losses_of_rows,
    mapped,
    outputs,
    problem_of,
    reduce,
)
from fusedops.integrations.dtensor.rule import ALL, SUM, Call, Rule, Sharding

__all__ = ["HANDLERS", "RULES"]

OF_CLASSES = Shard(0)
backward = torch.ops.fusedops.linear_cross_entropy_backward


def _operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """This rank's input, weight and bias."""
    return (
        problem.local_part("input", ROWS),
        problem.local_part("linear_weight", ALL, OF_CLASSES),
        problem.local_part("linear_bias", ALL, OF_CLASSES),
    )


def _gradients(problem: Problem, gradients: Any) -> tuple[DTensor | None, ...]:
    """The gradients as DTensors: weight's and bias's are sums over the rows of all ranks."""
    names = "input", "linear_weight", "linear_bias"
    weight_placements = problem.placements(SUM, OF_CLASSES)
    placements = problem.placements(ROWS), weight_placements, weight_placements
    return tuple(
        None if t is None else to_dtensor(t, problem.mesh, p, getattr(problem.call, name).shape)
        for t, p, name in zip(gradients, placements, names, strict=True)
    )


def _forward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    problem = problem_of(op, args, kwargs, "linear_weight", 0)
    check_targets(op, problem)
    x, weight, bias = _operands(problem)
    gradient_mask = list(problem.call.gradients)
    if problem.classes:
        targets, live, here = local_targets(problem)
        options = IGNORED, NONE, list(problem.call.scalars)
        _, lse, *_ = op(x, weight, targets, bias, None, *options, torch.float32, [False] * 3)
        logits, _ = mapped(problem, _logits(x, weight, bias, targets.clamp(min=0)))
        losses, lse = losses_of_rows(problem, lse, logits, live, here)
        loss, total = reduce(problem, losses, live)
        gradients: Any = [None] * 3
        if any(gradient_mask):
            grad = torch.ones_like(loss, dtype=torch.float32)
            gradients = _shared_row_gradients(problem, grad, lse, total, gradient_mask)
    else:
        targets = problem.local_part("target", ROWS)
        class_weights = problem.local_part("weight", ALL)
        operands = x, weight, targets, bias, class_weights
        loss, lse, total, gradients = all_losses(problem, op, operands, gradient_mask)
    return *outputs(problem, loss, lse, total), *_gradients(problem, gradients)


def _backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    problem = problem_of(op, args, kwargs, "linear_weight", 0)
    lse, total = problem.local_part("lse", ROWS), problem.local_part("total", ALL)
    gradient_mask = list(problem.call.output_mask)
    if problem.classes:
        gradients: Any = _shared_row_gradients(problem, problem.gradient, lse, total, gradient_mask)
    else:
        x, weight, bias = _operands(problem)
        targets = problem.local_part("target", ROWS)
        class_weights = problem.local_part("weight", ALL)
        operands = x, weight, targets, bias, class_weights
        options = problem.call.ignore_index, problem.call.reduction, list(problem.call.scalars)
        gradients = op(problem.gradient, *operands, lse, total, *options, gradient_mask)
    return _gradients(problem, gradients)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    """Each row's logit of one class, float64."""
    z = (x.double() * weight[classes].double()).sum(-1)
    return z if bias is None else z + bias[classes].double()


def _shared_row_gradients(
    problem: Problem, grad: Tensor, lse: Tensor, total: Tensor, gradient_mask: list[bool]
) -> list[Tensor | None]:
    """Gradients of rows that ranks share: the input's whole, weight's and bias's local parts."""
    x, weight, bias = _operands(problem)
    targets, live, here = local_targets(problem)
    targets = targets.where(here | ~live, problem.count)
    weight = F.pad(weight, (0, 0, 0, 1))
    bias = x.new_zeros(problem.count) if bias is None else bias
    bias = F.pad(bias, (0, 1), value=-torch.inf)
    operands = x, weight, targets, bias, None
    dx, *more = backward(grad, *operands, lse, total, *problem.local_options, gradient_mask)
    dx = None if dx is None else problem.over_classes(dx)
    return [dx, *(None if t is None else t[:-1].contiguous() for t in more)]


def _log_probs(call: Call) -> Iterator[Sharding]:
    row = dict.fromkeys(("input", "target", "lse", "mean"), ROWS)
    yield [ROWS] * 5, row


def _log_prob_gradients(call: Call) -> Iterator[Sharding]:
    names = "grad_log_probs", "grad_entropy", "input", "target", "lse", "mean"
    yield (ROWS, SUM, SUM), dict.fromkeys(names, ROWS)


def _probs_returned(call: Call) -> tuple[bool, ...]:
    entropy, top1 = call.wanted
    return True, entropy, top1, True, entropy


HANDLERS = {"linear_cross_entropy_forward": _forward, "linear_cross_entropy_backward": _backward}
RULES = {
    "linear_log_probs_forward": Rule(_probs_returned, _log_probs),
    "linear_log_probs_backward": Rule(lambda c: c.output_mask, _log_prob_gradients),
}
