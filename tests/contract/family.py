"""Defines an operator family's test calls; collects them from `tests/<family>/contract.py`.

The contract's tests cover a new family as soon as that file defines `FAMILY`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.testing import device_of, gradients, placed

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Batch = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A way of calling an operator, with few numbers.

    draw: float32 arguments on the CPU, for a batch of rows such as (6,), (2, 3) or (). If `tiny`,
    as few numbers as there can be, for tests that vary each. names: the last arguments are passed
    by these. still: the arguments, by place, that get no gradient here though they are floating.
    kept: those that the backward reads, so that a change in place is an error. draws: the reference
    with its sums in other orders, where a few numbers make up a result. smooth: whether no rounding
    decides which derivative an element has.
    """

    operator: str
    function: Callable
    reference: Callable
    draw: Callable[..., tuple]
    options: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    still: tuple[int, ...] = ()
    kept: tuple[int, ...] = (0,)
    draws: Callable[[], tuple[Callable, ...]] = tuple
    smooth: bool = True

    def args(
        self, *batch: int, dtype: torch.dtype = F32, backend: str = "default", tiny: bool = False
    ) -> tuple:
        drawn = (a.to(dtype) if floating(a) else a for a in self.draw(batch, tiny))
        return placed(tuple(drawn), device(backend))

    def by_name(self, args: tuple) -> tuple[tuple, dict[str, Any]]:
        """The arguments as the operator takes them."""
        first = len(args) - len(self.names)
        return args[:first], dict(zip(self.names, args[first:], strict=True)) | self.options

    def on_leaves(self, run: Callable, args: tuple) -> tuple[Callable, tuple]:
        """`run` as a function of the arguments that have gradients, and those."""
        places = [i for i, a in enumerate(args) if floating(a) and i not in self.still]

        def called(*leaves: Tensor) -> Any:
            full = [_beside(a, leaves[0]) for a in args]
            for i, leaf in zip(places, leaves, strict=True):
                full[i] = leaf
            positional, named = self.by_name(tuple(full))
            return run(*positional, **named)

        return called, tuple(args[i] for i in places)

    def both(self, args: tuple) -> tuple[Callable, Callable, tuple]:
        """The function and the reference of the leaves, and these."""
        function, leaves = self.on_leaves(self.function, args)
        return function, self.on_leaves(self.reference, args)[0], leaves


@dataclass(frozen=True)
class CodedRows:
    """A way of calling an operator that returns quantized rows, each with its scale.

    draw: arguments of a shape and a dtype. exact: the rows in float64 of arguments and options.
    options: the keywords to call it with, one after the other.
    """

    operator: str
    function: Callable
    reference: Callable
    draw: Callable[[tuple[int, ...], torch.dtype], tuple]
    exact: Callable[..., Tensor]
    options: tuple[dict[str, Any], ...] = ({},)


@dataclass(frozen=True)
class Family:
    """How a family's operators are called in the contract's tests.

    calls: for every test. more: for those that cost little. twice: for double backward alone.
    further: for tests that compare bits. kernels: for each variant, the kernels' own operators with
    arguments on a device; later ones may need the results of earlier ones. backends: those that the
    tests force; "default" forces none. batches: of a double backward. draws: how many inputs its
    error is measured over, where the error of a few numbers is luck. dtypes: of a double backward.
    compilers: torch.compile's options. whole: whether the calls have all that the operators take.
    symbolic: whether torch.fx traces the functions. keeps_outputs: whether the backward reads the
    outputs, which then may not change. errors: wrong calls, by what they say. kernel_errors: those
    of the kernels' own operators. on_gpus: calls of the sizes that models have; each is one launch.
    launches: those of a forward and its backward, where that is a number. graphs: calls that a CUDA
    graph captures too, of several launches each. coded_rows: calls that return quantized rows.
    """

    calls: dict[str, Call]
    kernels: dict[str, Callable[[torch.device], Iterator[tuple[str, tuple]]]]
    more: dict[str, Call] = field(default_factory=dict)
    further: dict[str, Call] = field(default_factory=dict)
    twice: dict[str, Call] = field(default_factory=dict)
    backends: tuple[str, ...] = ("default",)
    batches: tuple[Batch, ...] = ((6,),)
    draws: int = 1
    compilers: tuple[dict[str, Any], ...] = ({"dynamic": True},)
    dtypes: tuple[torch.dtype, ...] = (F32,)
    whole: bool = True
    symbolic: bool = True
    keeps_outputs: bool = False
    errors: dict[str, Callable] = field(default_factory=dict)
    kernel_errors: dict[str, Callable] = field(default_factory=dict)
    on_gpus: dict[str, Call] = field(default_factory=dict)
    launches: int | None = 2
    graphs: dict[str, Call] = field(default_factory=dict)
    coded_rows: dict[str, CodedRows] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    name: importlib.import_module(f"{name}.contract").FAMILY
    for name in fusedops.backends.FAMILIES
    if importlib.util.find_spec(f"{name}.contract")
}


def floating(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


def _beside(a: Any, leaf: Tensor) -> Any:
    """An argument that goes with a leaf: on its device, and in float64 if that is."""
    if not isinstance(a, Tensor):
        return a
    return a.to(leaf.device, F64 if floating(a) and leaf.dtype == F64 else None)


def device(backend: str) -> torch.device:
    return torch.device("cpu") if backend == "default" else device_of(backend)


def on(backend: str) -> AbstractContextManager:
    return nullcontext() if backend == "default" else fusedops.backend(backend)


def each(
    names: str, cases_of: Callable[[Family], Iterator[tuple[str, tuple]]]
) -> pytest.MarkDecorator:
    """Parametrizes a test over what is found in all families."""
    cases = [
        pytest.param(*values, id=f"{name}-{of}")
        for name, family in FAMILIES.items()
        for of, values in cases_of(family)
    ]
    return pytest.mark.parametrize(names, cases)


def _calls(more: bool, family: Family) -> Iterator[tuple[str, tuple]]:
    for name, call in (family.calls | family.more | family.twice if more else family.calls).items():
        for backend in family.backends:
            yield f"{name}-{backend}", (call, backend)


CALLS = each("call,backend", partial(_calls, False))
EVERY = each("call,backend", partial(_calls, True))


FUNCTIONS = each("call", lambda family: ((n, (call,)) for n, call in family.calls.items()))


def as_tuple(outputs: Any) -> tuple:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def moved(leaves: tuple, draws: int) -> list[list[Tensor]]:
    """Inputs near these. Over several the luck of their roundings does not decide."""
    draw = torch.Generator().manual_seed(1)
    steps = ([torch.randn(x.shape, generator=draw).to(x) for x in leaves] for _ in range(draws))
    return [[x * (1 + 0.01 * step) for x, step in zip(leaves, s, strict=True)] for s in steps]


def over(run: Callable, inputs: list[list[Tensor]], to: torch.dtype) -> dict[str, Tensor]:
    """The results and gradients of all these inputs, in a dtype."""
    results = [gradients(run, tuple(x.to(to) for x in given)) for given in inputs]
    return {key: torch.stack([given[key] for given in results]) for key in results[0]}
