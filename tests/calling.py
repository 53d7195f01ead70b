"""Wraps functions as modules for compilers; lists the fusedops operators that a call runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
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


def operators(model: nn.Module, x: Tensor) -> list[str]:
    """Returns our operators in the one graph that torch.compile makes of a call."""
    names: list[str] = []

    def collect(graph, example):
        targets = map(str, (node.target for node in graph.graph.nodes))
        names.extend(t.split(".")[1] for t in targets if t.startswith("fusedops."))
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(model, backend=collect, fullgraph=True)(x)
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    return names


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
