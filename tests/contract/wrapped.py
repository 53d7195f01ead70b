"""Wraps functions for tests: detaches some arguments, or returns views of the outputs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def with_gradients_of(run: Callable, *places: int) -> Callable:
    """`run` with its other tensors detached."""

    def called(*args: Any, **options: Any) -> Any:
        fixed = {i: a.detach() for i, a in enumerate(args) if isinstance(a, Tensor)}
        return run(*(a if i in places else fixed.get(i, a) for i, a in enumerate(args)), **options)

    return called


def viewed(run: Callable, view: Callable[[Tensor], Tensor]) -> Callable:
    """A view of each output of `run`, whose gradient so comes in with such strides."""

    def called(*args: Any, **options: Any) -> Any:
        outputs = run(*args, **options)
        return tuple(map(view, outputs)) if isinstance(outputs, tuple) else view(outputs)

    return called
