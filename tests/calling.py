"""A function as a module, for compilers, exports and hooks; and the kernels that calls run."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(nn.Module):
    """Calls a function. parts: the modules that it calls, which become submodules."""

    def __init__(self, function: Callable, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _Kernels(TorchDispatchMode):
    """Records which of our kernels run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedops":
            self.seen.add(function._opname)
        return function(*args, **kwargs or {})


def kernels(*calls: Callable) -> set[str]:
    """Returns the names of our kernel operators that calls run."""
    with _Kernels() as mode:
        for call in calls:
            call()
    return mode.seen
