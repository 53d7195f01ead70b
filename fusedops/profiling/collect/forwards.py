"""Hooks around every module's forward, which torch.compile neither traces nor keeps."""

import gc
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fusedops.patching.core.swap import observer, original_class

__all__ = ["Forwards", "around", "class_name", "compiled_modules", "is_compiled"]

Hook = Callable[..., Any]


class Forwards:
    """Calls `begins(module)` and `ends(module, output)` around forwards until `close`.

    They are called for every module except those inside of compiled code. The compiler traces the
    hooks that it finds, and guards their number; therefore they are removed while a compiled module
    runs. A compiled function has no module that says when it begins: there the hooks trace to
    nothing, and it is compiled again when they change.
    """

    def __init__(
        self, begins: Callable[[nn.Module], None], ends: Callable[[nn.Module, Any], None]
    ) -> None:
        self._begins, self._ends = begins, ends
        self._is_over = False
        self._handles: list[RemovableHandle] = []
        self._listen()

    def close(self) -> None:
        self._is_over = True
        self._pause()

    def _listen(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]

    def _pause(self) -> None:
        for handle in self._handles:
            handle.remove()

    @observer
    def _begin(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._begins(module)
        if is_compiled(module):
            self._pause()
            self._handles = [module.register_forward_hook(self._compiled_ends, always_call=True)]

    @observer
    def _end(self, module: nn.Module, _: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            self._ends(module, output)

    @observer
    def _compiled_ends(self, module: nn.Module, _: object, output: object) -> None:
        self._pause()
        if not self._is_over:
            self._ends(module, output)
            self._listen()


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
        handles.append(outer.register_forward_pre_hook(_eager(begins), with_kwargs=True))
    if ends is not None:
        after = _eager(lambda *_: ends())
        handles.append(outer.register_forward_hook(after, always_call=True))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _around_compiled(
    model: nn.Module, begins: Hook | None, ends: Hook | None
) -> Callable[[], None]:
    if not isinstance(model._compiled_call_impl, Watched):
        model._compiled_call_impl = Watched(model, model._compiled_call_impl)
    watched: Watched = model._compiled_call_impl
    pair = begins, ends
    watched.pairs.append(pair)

    def remove() -> None:
        if pair in watched.pairs:
            watched.pairs.remove(pair)
        if not watched.pairs and model._compiled_call_impl is watched:
            model._compiled_call_impl = watched.original

    return remove


class Watched:
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
        if issubclass(type(value), nn.Module) and is_compiled(value):
            yield value


def _eager(hook: Hook) -> Hook:
    """The hook for calls outside of compiled code."""

    @wraps(hook)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(*args, **kwargs)

    return outside


def class_name(module: nn.Module) -> str:
    """The class's name before patch; of what torch.compile made, that of the model inside."""
    return original_class(getattr(module, "_orig_mod", module)).__name__


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made the module, or `module.compile()` was called."""
    compiled = vars(module).get("_compiled_call_impl")
    return type(module).__name__ == "OptimizedModule" or compiled is not None
