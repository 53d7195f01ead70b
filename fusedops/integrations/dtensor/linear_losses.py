"""Losses of a sharded head: the linear cross entropy, over rows and over the vocabulary.

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

from fusedops.integrations.dtensor.local import whole
from fusedops.integrations.dtensor.losses import (
    IGNORED,
    NONE,
    ROWS,
    Problem,
    all_losses,
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
        problem.part("input", ROWS),
        problem.part("linear_weight", ALL, OF_CLASSES),
        problem.part("linear_bias", ALL, OF_CLASSES),
    )


def _gradients(problem: Problem, made: Any) -> tuple[DTensor | None, ...]:
    """The whole gradients: those of weight and bias are sums over the rows of all ranks."""
    names = "input", "linear_weight", "linear_bias"
    of_weight = problem.placed(SUM, OF_CLASSES)
    places = problem.placed(ROWS), of_weight, of_weight
    return tuple(
        None if t is None else whole(t, problem.mesh, place, getattr(problem, name).shape)
        for t, place, name in zip(made, places, names, strict=True)
    )


def _forward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    problem = problem_of(op, args, kwargs, "linear_weight", 0)
    x, weight, bias = _operands(problem)
    wanted = list(problem.gradients)
    if problem.classes:
        targets, live, here = local_targets(problem)
        numbers = IGNORED, NONE, list(problem.scalars)
        _, lse, *_ = op(x, weight, targets, bias, None, *numbers, torch.float32, [False] * 3)
        own = _logits(x, weight, bias, targets.clamp(min=0))
        losses, lse = losses_of_rows(problem, lse, mapped(problem, own)[0], live, here)
        loss, total = reduce(problem, losses, live)
        made: Any = [None] * 3
        if any(wanted):
            one = torch.ones_like(loss, dtype=torch.float32)
            made = _of_shared_rows(problem, one, lse, total, wanted)
    else:
        targets, of_classes = problem.part("target", ROWS), problem.part("weight", ALL)
        operands = x, weight, targets, bias, of_classes
        loss, lse, total, made = all_losses(problem, op, operands, wanted)
    return *outputs(problem, loss, lse, total), *_gradients(problem, made)


def _backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    problem = problem_of(op, args, kwargs, "linear_weight", 0)
    lse, total, wanted = problem.part("lse", ROWS), problem.part("total", ALL), problem.output_mask
    if problem.classes:
        made = _of_shared_rows(problem, problem.gradient, lse, total, list(wanted))
    else:
        x, weight, bias = _operands(problem)
        operands = x, weight, problem.part("target", ROWS), bias, problem.part("weight", ALL)
        numbers = problem.ignore_index, problem.reduction, list(problem.scalars)
        made = op(problem.gradient, *operands, lse, total, *numbers, list(wanted))
    return _gradients(problem, made)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    """Each row's logit of one class, float64."""
    z = (x.double() * weight[classes].double()).sum(-1)
    return z if bias is None else z + bias[classes].double()


def _of_shared_rows(
    problem: Problem, grad: Tensor, lse: Tensor, total: Tensor, wanted: list[bool]
) -> list[Tensor | None]:
    """The gradients of rows that ranks share: the input's of all, weight's and bias's of here."""
    x, weight, bias = _operands(problem)
    targets, live, here = local_targets(problem)
    targets = targets.where(here | ~live, problem.count)
    weight = F.pad(weight, (0, 0, 0, 1))
    bias = x.new_zeros(problem.count) if bias is None else bias
    bias = F.pad(bias, (0, 1), value=-torch.inf)
    operands = x, weight, targets, bias, None
    dx, *more = backward(grad, *operands, lse, total, *problem.numbers, wanted)
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
