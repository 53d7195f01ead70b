"""Cross entropies of sharded logits: over rows, over the vocabulary (as loss_parallel), or both.

Each rank runs the kernels on its part. Losses are summed over the ranks, and each row's sum of
exponentials over the ranks that share its logits. Logits are not gathered, except over the
vocabulary if there are class weights or label smoothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fusedops.integrations.dtensor.local import (
    arguments,
    local,
    mesh_of,
    offset_of,
    reduced,
    whole,
)
from fusedops.integrations.dtensor.rule import ALL

__all__ = [
    "HANDLERS",
    "IGNORED",
    "NONE",
    "ROWS",
    "Problem",
    "all_losses",
    "local_targets",
    "losses_of_rows",
    "mapped",
    "outputs",
    "problem_of",
    "reduce",
]

NONE, MEAN, SUMMED = range(3)  # torch's numbers
IGNORED = -100  # in local targets, where the user's number may be another class
ROWS, CLASSES = Shard(0), Shard(1)
backward = torch.ops.fusedops.cross_entropy_backward


@dataclass
class Problem:
    """A call of a loss's kernel operator, cut into the ranks' parts.

    given: the arguments. rows, classes: the mesh's dimensions over which those are sharded. offset,
    count: this rank's classes.
    """

    given: dict[str, Any]
    mesh: DeviceMesh
    rows: list[int]
    classes: list[int]
    offset: int
    count: int

    def __getattr__(self, name: str) -> Any:
        return self.given[name]

    def placed(self, of_rows: Placement, of_classes: Placement = ALL) -> list[Placement]:
        """Placements over the mesh; replicated where nothing is sharded."""
        named = dict.fromkeys(self.rows, of_rows) | dict.fromkeys(self.classes, of_classes)
        return [named.get(dim, ALL) for dim in range(self.mesh.ndim)]

    def part(self, name: str, of_rows: Placement, of_classes: Placement = ALL) -> Any:
        return local(self.given[name], self.mesh, self.placed(of_rows, of_classes))

    def over_rows(self, t: Tensor) -> Tensor:
        return reduced(t, self.mesh, self.rows)

    def over_classes(self, t: Tensor, by: str = "sum") -> Tensor:
        return reduced(t, self.mesh, self.classes, by)

    @property
    def gradient(self) -> Tensor:
        """The loss's gradient, for this rank's rows."""
        return self.part("grad", ROWS if self.reduction == NONE else ALL)

    @property
    def numbers(self) -> tuple[int, int, list[float]]:
        """ignore_index, reduction and scalars, for local targets."""
        return IGNORED, self.reduction, list(self.scalars)


def problem_of(
    op: torch._ops.OpOverload, args: tuple, kwargs: dict, logits: str = "input", dim: int = 1
) -> Problem:
    """logits: the argument whose dimension `dim` is the classes."""
    given = arguments(op, args, kwargs)
    mesh = mesh_of(given.values())
    plain = given["weight"] is None and given["scalars"][0] == 0
    classes = _cuts(given[logits], dim, mesh) if plain else []
    if len(classes) > 1 or (classes and _leaves_a_rank_empty(given[logits], dim, classes[0])):
        classes = []
    rows = [i for i in _cuts(given["input"], 0, mesh) if i not in classes]
    offset, count = 0, given[logits].shape[dim]
    if classes:
        only = [Shard(dim) if i in classes else ALL for i in range(mesh.ndim)]
        cut = given[logits].redistribute(mesh, only)
        offset, count = offset_of(cut, dim), cut.to_local().shape[dim]
    return Problem(given, mesh, rows, classes, offset, count)


def _cuts(t: Any, dim: int, mesh: DeviceMesh) -> list[int]:
    """The mesh's dimensions over which a dimension of t is sharded, in plain slices."""
    held = t.placements if isinstance(t, DTensor) else ()
    return [i for i, p in enumerate(held) if type(p) is Shard and p.dim == dim]


def _leaves_a_rank_empty(t: DTensor, dim: int, mesh_dim: int) -> bool:
    ranks, size = t.device_mesh.size(mesh_dim), t.shape[dim]
    return -(-size // ranks) * (ranks - 1) >= size


def local_targets(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(local targets, which rows count, which of them have their target's logit here).

    A target on another rank is class 0 in the first.
    """
    target = problem.part("target", ROWS)
    live = target != problem.ignore_index
    moved = target - problem.offset
    here = live & (moved >= 0) & (moved < problem.count)
    return moved.where(here, 0).where(live, IGNORED), live, here


def mapped(problem: Problem, z: Tensor) -> tuple[Tensor, Tensor]:
    """softcap tanh(scale z / softcap), and its derivative; in float64."""
    _, _, scale, softcap = problem.scalars
    z = z.double() * scale
    if not softcap:
        return z, torch.full_like(z, scale)
    bent = torch.tanh(z / softcap)
    return softcap * bent, scale * (1 - bent.square())


def losses_of_rows(
    problem: Problem, lse: Tensor, own: Tensor, live: Tensor, here: Tensor
) -> tuple[Tensor, Tensor]:
    """(each row's loss, its log-sum-exp). lse: of local logits. own: the target's mapped logit."""
    top = problem.over_classes(lse, "max")
    lse = (top + problem.over_classes((lse - top).exp()).log()).where(live, 0.0)
    own = problem.over_classes(own.where(here, 0.0))
    losses = lse - own + problem.scalars[1] * lse.square()
    return losses.where(live, 0.0), lse


def reduce(problem: Problem, losses: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """(the loss of all ranks' rows, the number of rows that count), both float64."""
    total = live.sum(dtype=torch.float64)
    if problem.reduction == NONE:  # whose backward does not read the number
        return losses, total
    loss, total = problem.over_rows(losses.sum()), problem.over_rows(total)
    return (loss / total if problem.reduction == MEAN else loss), total


def all_losses(
    problem: Problem, run: Any, operands: tuple, gradients: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """A forward with whole rows here: the kernel, then sums over the ranks.

    Returns loss, lse, total and the gradients that the forward makes, of this rank's rows.
    """
    sums = problem.reduction != NONE
    reduction, dtype = (SUMMED, torch.float32) if sums else (NONE, problem.dtype)
    numbers = problem.ignore_index, reduction, list(problem.scalars)
    loss, lse, total, *made = run(*operands, *numbers, dtype, gradients)
    if sums:
        loss, total = problem.over_rows(loss), problem.over_rows(total)
    if problem.reduction == MEAN:
        loss, made = loss / total, [t if t is None else (t / total).to(t.dtype) for t in made]
    return loss, lse, total, made


def outputs(problem: Problem, loss: Tensor, lse: Tensor, total: Tensor) -> tuple[DTensor, ...]:
    """The first outputs of a forward."""
    rows, replicated = problem.placed(ROWS), problem.placed(ALL)
    count = problem.target.shape[0]
    of_loss: tuple = (rows, [count]) if problem.reduction == NONE else (replicated, [])
    return (
        whole(loss.to(problem.dtype), problem.mesh, *of_loss),
        whole(lse, problem.mesh, rows, [count]),
        whole(total, problem.mesh, replicated, []),
    )


def _forward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    problem = problem_of(op, args, kwargs)
    x, place = problem.part("input", ROWS, CLASSES), problem.placed(ROWS, CLASSES)
    if problem.classes:
        targets, live, here = local_targets(problem)
        numbers = IGNORED, NONE, list(problem.scalars)
        _, lse, *_ = op(x, targets, None, *numbers, torch.float32, False)
        own, _ = mapped(problem, x.gather(1, targets.clamp(min=0)[:, None])[:, 0])
        losses, lse = losses_of_rows(problem, lse, own, live, here)
        loss, total = reduce(problem, losses, live)
        made = None
        if problem.with_gradient:
            one = torch.ones_like(loss, dtype=torch.float32)
            made = _of_shared_rows(problem, one, x, lse, total)
    else:
        operands = x, problem.part("target", ROWS), problem.part("weight", ALL)
        loss, lse, total, (made,) = all_losses(problem, op, operands, problem.with_gradient)
    found = outputs(problem, loss, lse, total)
    return *found, whole(made, problem.mesh, place, problem.input.shape)


def _backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> DTensor | None:
    problem = problem_of(op, args, kwargs)
    x, place = problem.part("input", ROWS, CLASSES), problem.placed(ROWS, CLASSES)
    lse, total = problem.part("lse", ROWS), problem.part("total", ALL)
    if problem.classes:
        dx = _of_shared_rows(problem, problem.gradient, x, lse, total)
    else:
        rows = x, problem.part("target", ROWS), problem.part("weight", ALL), lse, total
        numbers = problem.ignore_index, problem.reduction, list(problem.scalars)
        dx = op(problem.gradient, *rows, *numbers)
    return whole(dx, problem.mesh, place, problem.input.shape)


def _of_shared_rows(
    problem: Problem, grad: Tensor, x: Tensor, lse: Tensor, total: Tensor
) -> Tensor:
    """The gradient of this rank's logits of rows that ranks share.

    The kernel gets class 0 as the target of rows whose target is on another rank. Their gradient of
    that logit is computed again, without a target.
    """
    targets, live, here = local_targets(problem)
    dx = backward(grad, x, targets, None, lse, total, *problem.numbers)
    z, slope = mapped(problem, x[:, 0])
    of_row = grad.double() / (total if problem.reduction == MEAN else 1)
    share = of_row * (1 + 2 * problem.scalars[1] * lse)
    first = share * (z - lse).exp() * slope
    dx[:, 0] = first.to(dx.dtype).where(live & ~here, dx[:, 0])
    return dx


HANDLERS = {"cross_entropy_forward": _forward, "cross_entropy_backward": _backward}
