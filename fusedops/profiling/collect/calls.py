"""Hooks that see a module's calls, compiled or not, and that torch.compile does not see."""

import gc
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn

__all__ = ["around", "compiled_modules", "eager", "is_compiled"]

Hook = Callable[..., Any]


def eager(hook: Hook) -> Hook:
    """The hook for calls that are not compiled.

    torch.compile would trace a hook with the module, and trace it again when its state changes.
    """

    @wraps(hook)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(*args, **kwargs)

    return outside


def around(
    model: nn.Module, begins: Hook | None = None, ends: Hook | None = None
) -> Callable[[], None]:
    """Calls `begins(model, args, kwargs)` and `ends()` around each call; returns what ends this.

    A compiled model's hooks run inside of what is compiled, so its calls are seen from outside.
    """
    outer = next((m for m in compiled_modules() if getattr(m, "_orig_mod", m) is model), model)
    if outer._compiled_call_impl is not None:
        return _around_compiled(outer, begins, ends)
    handles = []
    if begins is not None:
        handles.append(outer.register_forward_pre_hook(eager(begins), with_kwargs=True))
    if ends is not None:
        after = eager(lambda *_: ends())
        handles.append(outer.register_forward_hook(after, always_call=True))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _around_compiled(
    model: nn.Module, begins: Hook | None, ends: Hook | None
) -> Callable[[], None]:
    if not isinstance(model._compiled_call_impl, _Watched):
        model._compiled_call_impl = _Watched(model, model._compiled_call_impl)
    watched: _Watched = model._compiled_call_impl
    pair = begins, ends
    watched.pairs.append(pair)

    def remove() -> None:
        if pair in watched.pairs:
            watched.pairs.remove(pair)
        if not watched.pairs and model._compiled_call_impl is watched:
            model._compiled_call_impl = watched.original

    return remove


class _Watched:
    """A model's compiled call, with calls of `pairs` around it."""

    def __init__(self, model: nn.Module, original: Any) -> None:
        self.model, self.original = model, original
        self.pairs: list[tuple[Hook | None, Hook | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pairs = tuple(self.pairs)  # a hook may remove itself
        for begins, _ in pairs:
            if begins is not None:
                begins(self.model, args, kwargs)
        try:
            return self.original(*args, **kwargs)
        finally:
            for _, ends in pairs:
                if ends is not None:
                    ends()


def compiled_modules() -> Iterator[nn.Module]:
    """Every module that `torch.compile` returned, or that was compiled in place."""
    if "torch._dynamo" not in sys.modules:  # takes a second to import, and nothing is compiled
        return
    for value in gc.get_objects():
        if issubclass(type(value), nn.Module) and _compiles(value):
            yield value


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it is compiled."""
    return any(map(_compiles, model.modules()))


def _compiles(module: nn.Module) -> bool:
    in_place = vars(module).get("_compiled_call_impl") is not None
    return in_place or type(module).__name__ == "OptimizedModule"
