"""Defines a benchmark case: an operation with its implementations, a mode, a dtype and a shape."""

import importlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

FORWARD, BACKWARD, TRAINING = "forward", "backward", "forward+backward"

Run = Callable[[], "Tensor | tuple[Tensor, ...]"]


class Skip(Exception):
    """Raised if a contender cannot run here; the message says why."""


class NotInstalled(Skip):
    """Raised if a contender's package is missing: nothing was expected of it here."""


@dataclass(frozen=True)
class Contender:
    """One implementation to time.

    prepare(*inputs) returns functools.partial(function, *arguments); timing runs inside `scope`.
    Set `checked` to False if the contender computes something else and only its time matters.
    """

    prepare: Callable[..., Run]
    scope: Callable[[], AbstractContextManager] = nullcontext
    checked: bool = True


@dataclass(frozen=True)
class Operation:
    """Describes one operator to the harness. Ratios are relative to the first contender."""

    name: str
    inputs: Callable[[Sequence[int], torch.dtype, torch.device], tuple[Tensor, ...]]
    reference: Callable[..., "Tensor | tuple[Tensor, ...]"]
    bytes_moved: Callable[..., int]  # (mode, *inputs) -> the fewest bytes that must move
    contenders: dict[str, Contender]
    flops: Callable[..., int] | None = None  # (mode, *inputs) -> FLOP, for compute-bound work
    rows: Callable[[Tensor], Tensor] = torch.Tensor.detach  # result -> the yardstick's rows


@dataclass(frozen=True)
class Case:
    """One row: an operation in one mode, on one shape and dtype, and the clock that times it.

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
        available = self.operation.contenders
        return available if self.only is None else {name: available[name] for name in self.only}


def grad_mode(mode: str) -> AbstractContextManager:
    return torch.no_grad() if mode == FORWARD else torch.enable_grad()


def bind(
    run: Run, mode: str, leaves: Sequence[Tensor], grads: Sequence[Tensor] | None = None
) -> Run:
    """Returns the call to time: the operation, its gradients, or both.

    grads: the outputs' gradients. A loss needs none; its gradient is then 1.
    """
    if mode == FORWARD:
        return run
    if mode == TRAINING:
        return lambda: torch.autograd.grad(run(), leaves, grads)
    outputs = run()
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def with_inputs(run: Run, old: Sequence[Tensor], new: Sequence[Tensor]) -> Run:
    """Returns `run` with other arguments. Preparing again would recompile."""
    assert isinstance(run, partial), "prepare gave no functools.partial"
    swap = {id(a): b for a, b in zip(old, new, strict=True)}
    keywords = {name: swap.get(id(a), a) for name, a in run.keywords.items()}
    return partial(run.func, *(swap.get(id(a), a) for a in run.args), **keywords)


def in_turn(*runs: Run) -> Run:
    """Returns a function that calls the given ones in turn, forever."""
    turn = itertools.cycle(runs)
    return lambda: next(turn)()


def calling(function: Callable) -> Contender:
    """Returns a contender that calls `function` with the inputs."""
    return Contender(lambda *inputs: partial(function, *inputs))


def through_dispatcher(name: str, **options: Any) -> Contender:
    """Returns a contender that calls our operator through torch.ops."""
    return Contender(lambda *inputs: partial(getattr(torch.ops.fusedops, name), *inputs, **options))


def with_peers(operation: Operation, peers: dict[str, Contender]) -> Operation:
    return replace(operation, contenders=operation.contenders | peers)


def gpu_row(operation: Operation, mode: str, shape: tuple[int, ...], clock: str) -> Case:
    return Case(operation, mode, torch.bfloat16, shape, clock=clock)


def gpu_rows(
    operations: Sequence[Operation],
    large: Sequence[tuple[int, ...]],
    small: Sequence[tuple[int, ...]],
) -> list[Case]:
    """Returns the rows of a family of small kernels on a GPU.

    Large shapes are timed forward, backward and both, with the device's clock. The host's launches
    dominate shapes of few tokens, so these use the host's clock and a graph.
    """
    ways = [(mode, "device", large) for mode in (FORWARD, BACKWARD)]
    ways += [(FORWARD, "host", small), (TRAINING, "device", large)]
    ways += [(FORWARD, "graph", small), (TRAINING, "host", small)]
    return [
        gpu_row(operation, mode, shape, clock)
        for mode, clock, shapes in ways
        for operation in operations
        for shape in shapes
    ]


def compiled(contender: Contender) -> Contender:
    """Returns the contender under torch.compile."""

    def prepare(*inputs: Tensor) -> Run:
        need_compiler("torch.compile")
        torch.compiler.reset()
        # else repeated backwards find their saved tensors overwritten
        torch._functorch.config.donated_buffer = False
        call = contender.prepare(*inputs)
        assert isinstance(call, partial)
        return partial(torch.compile(call.func, dynamic=False), *call.args, **call.keywords)

    return Contender(prepare, contender.scope)


def without_compile(case: Case) -> Case:
    names = (name for name in case.contenders() if not name.startswith("compile"))
    return replace(case, only=tuple(names))


def need_compiler(who: str) -> None:
    """Raises Skip if there is no C++ compiler for torch.compile. who: the contender."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Skip(f"{who} needs a C++ compiler and {compiler} was not found")


def find(module: str, name: str) -> Any:
    """Imports `name` from `module`; raises Skip if something is missing."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise NotInstalled(f"{package} is not installed")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Skip(f"{module}.{name}: {error}") from error


def traffic(forward: int, backward: int) -> Callable[..., int]:
    """The number of x-sized tensors that a kernel must read and write; weights are small."""
    tensors = {FORWARD: forward, BACKWARD: backward, TRAINING: forward + backward}
    return lambda mode, x, *_: x.nbytes * tensors[mode]
