"""Attention scores that a model's lines have not computed yet."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Scores", "check_versions", "computed", "run", "versions"]

OPERATORS: dict[Any, Callable] = {
    "@": operator.matmul,
    "*": operator.mul,
    "/": operator.truediv,
    "+": operator.add,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "+=": operator.iadd,
}


def run(how: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation as the model has it. how: a callable, an operator, or `.method`."""
    if not isinstance(how, str):
        return how(*args, **kwargs)
    if how in OPERATORS:
        return OPERATORS[how](*args)
    return getattr(args[0], how[1:])(*args[1:], **kwargs)


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of q and k, or their softmax, before they are computed.

    layer: the module whose forward has them. q, k: [.., heads, length, width]. dtype: what the
    model's own scores would have here. scale, softcap, bias, dropout_p: as `attention` takes them.
    hidden: True where a key is not seen. fill: the largest number that hides one. how, args,
    kwargs: the operation that makes these scores. held: the tensors so far, with their versions.
    """

    layer: nn.Module
    q: Tensor
    k: Tensor
    how: Any
    args: tuple
    kwargs: dict[str, Any]
    dtype: torch.dtype
    held: tuple[tuple[Tensor, int], ...]
    scale: float = 1.0
    hidden: Tensor | None = None
    fill: float = -math.inf
    bias: Tensor | None = None
    softcap: float | None = None
    softmaxed: bool = False
    dropout_p: float = 0.0

    @cached_property
    def tensor(self) -> Tensor:
        """The scores, computed as the model's lines do."""
        check_versions(self.held)
        return run(self.how, [*map(computed, self.args)], self.kwargs)

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])
        return torch.Size((*batch, self.q.shape[-2], self.k.shape[-2]))

    @property
    def ndim(self) -> int:
        return self.q.dim()

    @property
    def device(self) -> torch.device:
        return self.q.device

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def computed(value: Any) -> Any:
    return value.tensor if type(value) is Scores else value


def versions(*tensors: Tensor) -> tuple[tuple[Tensor, int], ...]:
    """The tensors that have a version, which those of inference mode have not."""
    return tuple((t, t._version) for t in tensors if not t.is_inference())


def check_versions(held: tuple[tuple[Tensor, int], ...]) -> None:
    if any(t._version != version for t, version in held):
        raise RuntimeError(
            "fusedops: q, k or a mask was changed in place after the model computed its attention "
            "scores from it; patch(model, attention=False) runs such code as it is written"
        )
