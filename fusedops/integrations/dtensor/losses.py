"""DTensor handlers of cross_entropy, for logits sharded over rows, classes, or both.

Each rank runs the kernels on its part. Losses are summed over the ranks, and each row's sum of
exponentials over the ranks that share its logits. Logits are not gathered, except over the
vocabulary if there are class weights or label smoothing.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fusedops.integrations.dtensor.local import (
    arguments,
    leaves_a_rank_empty,
    local,
    local_range,
    mesh_of,
    placements_over,
    reduced,
    sharded_over,
    to_dtensor,
)
from fusedops.integrations.dtensor.rule import ALL

__all__ = [
    "HANDLERS",
    "IGNORED",
    "NONE",
    "ROWS",
    "Problem",
    "all_losses",
    "check_targets",
    "local_targets",
    "losses_of_rows",
    "mapped",
    "outputs",
    "problem_of",
    "reduce",
]

NONE, MEAN, SUMMED = range(3)  # torch's options
IGNORED = -100  # the local targets' ignore_index; the user's may equal a local class
ROWS, CLASSES = Shard(0), Shard(1)
backward = torch.ops.fusedops.cross_entropy_backward


@dataclass
class Problem:
    """A loss's kernel call and its sharding.

    call: the operator's arguments by name. rows, classes: the mesh's dimensions that shard those.
    offset, count: this rank's classes. vocabulary: the number of all classes.
    """

    call: SimpleNamespace
    mesh: DeviceMesh
    rows: list[int]
    classes: list[int]
    offset: int
    count: int
    vocabulary: int

    def placements(self, row_place: Placement, class_place: Placement = ALL) -> list[Placement]:
        """Placements over the mesh; replicated where nothing is sharded."""
        classes = dict.fromkeys(self.classes, class_place)
        return placements_over(self.mesh, dict.fromkeys(self.rows, row_place) | classes)

    def local_part(self, name: str, row_place: Placement, class_place: Placement = ALL) -> Any:
        argument = getattr(self.call, name)
        return local(argument, self.mesh, self.placements(row_place, class_place))

    def is_class(self, target: Tensor) -> Tensor:
        return (target >= 0) & (target < self.vocabulary)

    def over_rows(self, t: Tensor) -> Tensor:
        return reduced(t, self.mesh, self.rows)

    def over_classes(self, t: Tensor, by: str = "sum") -> Tensor:
        return reduced(t, self.mesh, self.classes, by)

    @property
    def gradient(self) -> Tensor:
        """The loss's gradient, for this rank's rows."""
        return self.local_part("grad", ROWS if self.call.reduction == NONE else ALL)

    @property
    def local_options(self) -> tuple[int, int, list[float]]:
        """ignore_index, reduction and scalars, for local targets."""
        return IGNORED, self.call.reduction, list(self.call.scalars)


def problem_of(
    op: torch._ops.OpOverload, args: tuple, kwargs: dict, logits: str = "input", dim: int = 1
) -> Problem:
    """logits: the argument whose dimension `dim` is the classes."""
    call = SimpleNamespace(**arguments(op, args, kwargs))
    mesh = mesh_of(vars(call).values())
    tensor = getattr(call, logits)
    vocabulary = count = tensor.shape[dim]
    plain = call.weight is None and call.scalars[0] == 0
    classes = sharded_over(tensor, dim) if plain else []
    if len(classes) > 1 or (classes and leaves_a_rank_empty(tensor, dim, classes)):
        classes = []
    rows = [i for i in sharded_over(call.input, 0) if i not in classes]
    offset = 0
    if classes:
        placements = placements_over(mesh, dict.fromkeys(classes, Shard(dim)))
        offset, count = local_range(tensor.shape, dim, mesh, placements)
    return Problem(call, mesh, rows, classes, offset, count, vocabulary)


def check_targets(op: torch._ops.OpOverload, problem: Problem) -> None:
    """Raises IndexError on all ranks if a target is neither a class nor ignore_index.

    On CPUs only: elsewhere such a row's loss is NaN, as the kernels' is.
    """
    call, mesh = problem.call, problem.mesh
    target, sharded = call.target, False
    if isinstance(target, DTensor):
        sharded = any(p != ALL for p in target.placements)
        target = problem.local_part("target", ROWS) if sharded else target.to_local()
    if type(target) is not Tensor or not target.is_cpu:
        return
    wrong = (target != call.ignore_index) & ~problem.is_class(target)
    any_wrong = wrong.any()
    if sharded:
        any_wrong = reduced(any_wrong.long(), mesh, range(mesh.ndim), "max")
    if any_wrong:
        here = target[wrong]
        name = op._schema.name.removeprefix("fusedops::").removesuffix("_forward")
        raise IndexError(
            f"{name}: target must be a class from 0 to {problem.vocabulary - 1} or ignore_index "
            f"{call.ignore_index}, got {here[0].item() if len(here) else 'another on another rank'}"
        )


def local_targets(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(local targets, which rows count, which of them have their target's logit here).

    A target on another rank is class 0 in the first.
    """
    target = problem.local_part("target", ROWS)
    live = target != problem.call.ignore_index
    moved = target - problem.offset
    here = live & (moved >= 0) & (moved < problem.count)
    return moved.where(here, 0).where(live, IGNORED), live, here


def mapped(problem: Problem, z: Tensor) -> tuple[Tensor, Tensor]:
    """softcap tanh(scale z / softcap), and its derivative; in float64."""
    _, _, scale, softcap = problem.call.scalars
    z = z.double() * scale
    if not softcap:
        return z, torch.full_like(z, scale)
    bent = torch.tanh(z / softcap)
    return softcap * bent, scale * (1 - bent.square())


def losses_of_rows(
    problem: Problem, lse: Tensor, logits: Tensor, live: Tensor, here: Tensor
) -> tuple[Tensor, Tensor]:
    """(each row's loss, its log-sum-exp). lse: the local logits'. logits: the mapped targets'.

    Both are NaN if the target is not a class.
    """
    is_class = problem.is_class(problem.local_part("target", ROWS))
    top = problem.over_classes(lse, "max")
    lse = top + problem.over_classes((lse - top).exp()).log()
    lse = lse.where(is_class, torch.nan).where(live, 0.0)
    logits = problem.over_classes(logits.where(here, 0.0))
    losses = lse - logits + problem.call.scalars[1] * lse.square()
    return losses.where(live, 0.0), lse


def reduce(problem: Problem, losses: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """(the loss of all ranks' rows, the number of rows that count), both float64."""
    total = live.sum(dtype=torch.float64)
    if problem.call.reduction == NONE:  # whose backward does not read the number
        return losses, total
    loss, total = problem.over_rows(losses.sum()), problem.over_rows(total)
    return (loss / total if problem.call.reduction == MEAN else loss), total


def all_losses(
    problem: Problem, op: torch._ops.OpOverload, operands: tuple, gradient_mask: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """A forward of whole rows: the kernel, then sums over the ranks.

    gradient_mask: the kernel's last argument. Returns the loss and total of all rows, and this
    rank's lse and gradients.
    """
    sums = problem.call.reduction != NONE
    reduction, dtype = (SUMMED, torch.float32) if sums else (NONE, problem.call.dtype)
    options = problem.call.ignore_index, reduction, list(problem.call.scalars)
    loss, lse, total, *gradients = op(*operands, *options, dtype, gradient_mask)
    if sums:
        loss, total = problem.over_rows(loss), problem.over_rows(total)
    if problem.call.reduction == MEAN:
        loss = loss / total
        gradients = [t if t is None else (t / total).to(t.dtype) for t in gradients]
    return loss, lse, total, gradients


def outputs(problem: Problem, loss: Tensor, lse: Tensor, total: Tensor) -> tuple[DTensor, ...]:
    """A forward's loss, lse and total as DTensors."""
    rows, replicated = problem.placements(ROWS), problem.placements(ALL)
    count = problem.call.target.shape[0]
    loss_layout: tuple = (rows, [count]) if problem.call.reduction == NONE else (replicated, [])
    return (
        to_dtensor(loss.to(problem.call.dtype), problem.mesh, *loss_layout),
        to_dtensor(lse, problem.mesh, rows, [count]),
        to_dtensor(total, problem.mesh, replicated, []),
    )


def _forward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    problem = problem_of(op, args, kwargs)
    check_targets(op, problem)
    x, placements = problem.local_part("input", ROWS, CLASSES), problem.placements(ROWS, CLASSES)
    if problem.classes:
        targets, live, here = local_targets(problem)
        options = IGNORED, NONE, list(problem.call.scalars)
        _, lse, *_ = op(x, targets, None, *options, torch.float32, False)
        logits, _ = mapped(problem, x.gather(1, targets.clamp(min=0)[:, None])[:, 0])
        losses, lse = losses_of_rows(problem, lse, logits, live, here)
        loss, total = reduce(problem, losses, live)
        gradients = None
        if problem.call.with_gradient:
            grad = torch.ones_like(loss, dtype=torch.float32)
            gradients = _shared_row_gradient(problem, grad, x, lse, total)
    else:
        operands = x, problem.local_part("target", ROWS), problem.local_part("weight", ALL)
        with_gradient = problem.call.with_gradient
        loss, lse, total, (gradients,) = all_losses(problem, op, operands, with_gradient)
    dx = to_dtensor(gradients, problem.mesh, placements, problem.call.input.shape)
    return *outputs(problem, loss, lse, total), dx


def _backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> DTensor | None:
    problem = problem_of(op, args, kwargs)
    x, placements = problem.local_part("input", ROWS, CLASSES), problem.placements(ROWS, CLASSES)
    lse, total = problem.local_part("lse", ROWS), problem.local_part("total", ALL)
    if problem.classes:
        dx = _shared_row_gradient(problem, problem.gradient, x, lse, total)
    else:
        target, weight = problem.local_part("target", ROWS), problem.local_part("weight", ALL)
        options = problem.call.ignore_index, problem.call.reduction, list(problem.call.scalars)
        dx = op(problem.gradient, x, target, weight, lse, total, *options)
    return to_dtensor(dx, problem.mesh, placements, problem.call.input.shape)


def _shared_row_gradient(
    problem: Problem, grad: Tensor, x: Tensor, lse: Tensor, total: Tensor
) -> Tensor:
    """The gradient of this rank's logits of rows that ranks share.

    The kernel gets class 0 as the target of rows whose target is on another rank. Their gradient of
    that logit is computed again, without a target.
    """
    targets, live, here = local_targets(problem)
    dx = backward(grad, x, targets, None, lse, total, *problem.local_options)
    z, slope = mapped(problem, x[:, 0])
    row_grad = grad.double() / (total if problem.call.reduction == MEAN else 1)
    share = row_grad * (1 + 2 * problem.call.scalars[1] * lse)
    first = share * (z - lse).exp() * slope
    dx[:, 0] = first.to(dx.dtype).where(live & ~here, dx[:, 0])
    return dx


HANDLERS = {"cross_entropy_forward": _forward, "cross_entropy_backward": _backward}
