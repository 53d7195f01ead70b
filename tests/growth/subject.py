"""Defines a growth subject: a function or module that memory-growth tests call repeatedly.

Functions are called with fresh inputs each time; modules are created once.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

F32, BF16 = torch.float32, torch.bfloat16
ROWS, N = 16, 64


@dataclass
class Subject:
    """A function or a module, and how to draw the tensors of one call.

    run: what is called. inputs: draws fresh tensors for each call, because a leaked reference to a
    tensor that is used again takes no memory. module: the module behind `run`; its parameters stay
    the same. bind: makes `run` from a copy of the module. around: the context that the calls need.
    flexible: how many of the inputs may change layout and dtype; None means all. left: the ways of
    calling that do not apply, each with its reason.
    """

    run: Callable[..., Any]
    inputs: Callable[[], list[Tensor]]
    module: nn.Module | None = None
    bind: Callable[[nn.Module], Callable[..., Any]] = lambda module: module
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    flexible: int | None = None
    left: dict[str, str] = field(default_factory=dict)

    def parameters(self) -> list[Tensor]:
        return [] if self.module is None else list(self.module.parameters())

    def forget_gradients(self) -> None:
        for p in self.parameters():
            p.grad = None


def total(outputs: Any) -> Tensor:
    """Returns the sum of squares of all floating outputs that have gradients."""
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    live = [t for t in tensors if t.requires_grad] or tensors
    return sum(t.square().sum(dtype=F32) for t in live)


def coded(function: Callable[..., tuple[Tensor, Tensor]], *shapes: tuple[int, ...]) -> Subject:
    """Dequantizes rows of codes. Their inputs have no gradient, a factor of one number has."""

    def run(factor: Tensor, *tensors: Tensor) -> Tensor:
        codes, scale = function(*tensors)
        return factor * (codes.float() * scale)

    return Subject(run, lambda: [leaf(), *(fixed(*shape) for shape in shapes)], flexible=1)


def leaf(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def fixed(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def numbers(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape)


def nn_module(module: nn.Module, inputs: Callable[[], list[Tensor]], **options: Any) -> Subject:
    run = options.get("bind", Subject.bind)(module)
    return Subject(run, inputs, module, **options)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> Callable[[], list[Tensor]]:
    return lambda: [leaf(*shape, dtype=dtype) for shape in shapes]


def rows() -> list[Tensor]:
    return [leaf(ROWS, N)]


def two() -> list[Tensor]:
    return [leaf(ROWS, N), leaf(ROWS, N)]


def of(
    function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = F32, **options: Any
) -> Subject:
    return Subject(functools.partial(function, **options), drawn(*shapes, dtype=dtype))


class Turns:
    """Returns the next of some things at each call, endlessly."""

    def __init__(self, things: Any) -> None:
        self._cycle = itertools.cycle(things)

    def __call__(self) -> Any:
        return next(self._cycle)
