"""A function as a module, for what takes modules alone: compilers, exports, hooks."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Calls(nn.Module):
    """Calls a function. parts: the modules that it calls, which become submodules."""

    def __init__(self, function: Callable, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
