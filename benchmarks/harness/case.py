"""What a benchmark file is made of: operations, their contenders, and one row of the table."""

import importlib
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

FORWARD, BACKWARD, TRAINING = "forward", "backward", "forward+backward"

Run = Callable[[], "Tensor | tuple[Tensor, ...]"]


class Skip(Exception):
    """A contender that cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """prepare(*inputs) gives functools.partial(lines, *arguments); scope is entered to time it.

    One that computes something else, to be compared in time alone, is not `checked`.
    """

    prepare: Callable[..., Run]
    scope: Callable[[], AbstractContextManager] = nullcontext
    checked: bool = True


@dataclass(frozen=True)
class Operation:
    """One operator as data. The first contender is the one that ratios are held against."""

    name: str
    inputs: Callable[[Sequence[int], torch.dtype, torch.device], tuple[Tensor, ...]]
    reference: Callable[..., "Tensor | tuple[Tensor, ...]"]
    bytes_moved: Callable[..., int]  # (mode, *inputs) -> the fewest bytes that the work can move
    contenders: dict[str, Contender]
    flops: Callable[..., int] | None = None  # (mode, *inputs) -> of work that arithmetic bounds
    rows: Callable[[Tensor], Tensor] = torch.Tensor.detach  # a result in the yardstick's rows


@dataclass(frozen=True)
class Case:
    """One row: an operation in one mode on one shape and dtype, and the clock that times it.

    `only` names its contenders.
    """

    operation: Operation
    mode: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    only: tuple[str, ...] | None = field(default=None, compare=False)
    clock: str = "wall"

    @property
    def title(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        clock = "" if self.clock == "wall" else f", {self.clock} time"
        return f"{self.operation.name} {self.mode} {dtype} {list(self.shape)}{clock}"

    def contenders(self) -> dict[str, Contender]:
        known = self.operation.contenders
        return known if self.only is None else {name: known[name] for name in self.only}


def grad_mode(mode: str) -> AbstractContextManager:
    return torch.no_grad() if mode == FORWARD else torch.enable_grad()


def bind(
    run: Run, mode: str, leaves: Sequence[Tensor], grads: Sequence[Tensor] | None = None
) -> Run:
    """The call that is timed: the operation, its gradients, or both.

    grads: of the outputs. A loss needs none, its own is then 1.
    """
    if mode == FORWARD:
        return run
    if mode == TRAINING:
        return lambda: torch.autograd.grad(run(), leaves, grads)
    outputs = run()
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def with_inputs(run: Run, old: Sequence[Tensor], new: Sequence[Tensor]) -> Run:
    """`run` with other arguments. Not prepared anew: what was compiled would be compiled again."""
    assert isinstance(run, partial), "prepare gave no functools.partial"
    swap = {id(a): b for a, b in zip(old, new, strict=True)}
    keywords = {name: swap.get(id(a), a) for name, a in run.keywords.items()}
    return partial(run.func, *(swap.get(id(a), a) for a in run.args), **keywords)


def in_turn(*runs: Run) -> Run:
    """A call of the first, then one of the second, and so on, again and again."""
    turn = itertools.cycle(runs)
    return lambda: next(turn)()


def compiled(contender: Contender) -> Contender:
    """torch.compile of a contender's lines."""

    def prepare(*inputs: Tensor) -> Run:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise Skip(f"torch.compile needs a C++ compiler and {compiler} was not found")
        torch.compiler.reset()
        # or a backward that is timed alone, again and again, finds its saved tensors overwritten
        torch._functorch.config.donated_buffer = False
        call = contender.prepare(*inputs)
        assert isinstance(call, partial)
        return partial(torch.compile(call.func, dynamic=False), *call.args)

    return Contender(prepare, contender.scope)


def find(module: str, name: str) -> Any:
    """`name` of `module`. Raises Skip where the package, or what it needs, is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Skip(f"{module}.{name}: {error}") from error


def rivals(row: Case) -> list[str]:
    """Whom every row must beat: torch.compile and Liger, whose kernels end at 65536 columns."""
    if row.shape[-1] > 65536:
        return ["eager"]
    return [name for name in row.contenders() if name.startswith(("compile", "liger"))]


def traffic(forward: int, backward: int) -> Callable[..., int]:
    """How many tensors of x's size a kernel must read and write; the weights are small."""
    tensors = {FORWARD: forward, BACKWARD: backward, TRAINING: forward + backward}
    return lambda mode, x, *_: x.nbytes * tensors[mode]
