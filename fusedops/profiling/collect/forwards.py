"""Hooks around every module's forward, which torch.compile neither traces nor keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fusedops.patching.core.swap import observer, original_class

__all__ = ["Forwards", "class_name", "is_compiled"]


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


def class_name(module: nn.Module) -> str:
    """The class's name before patch; of what torch.compile made, that of the model inside."""
    return original_class(getattr(module, "_orig_mod", module)).__name__


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made the module, or `module.compile()` was called."""
    compiled = getattr(module, "_compiled_call_impl", None)
    return type(module).__name__ == "OptimizedModule" or compiled is not None
