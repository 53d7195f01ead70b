"""A `forward` that someone has put on a module's instance: does it still run the class's?

Python finds the instance's attribute first. accelerate puts a wrapper there that calls the class's
forward; TRL one that calls it only without a fused head of its own; Liger one that never does.
"""

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fusedops.patching.attributes import enclosed, names_of

__all__ = ["Other", "instead"]


@dataclass(frozen=True)
class Other:
    """A function that runs instead of a class's forward. reads: the names in its code."""

    name: str
    reads: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.name} runs instead of its forward"


def instead(module: nn.Module, does_without: Collection[str] = ()) -> Other | None:
    """Which function runs instead of the class's forward; None where that one runs.

    A wrapper is followed through its closure and attributes to the class's forward. does_without:
    names of attributes; a function whose code reads one does the forward's work by itself.
    """
    if "forward" not in vars(module):
        return None
    own = {vars(cls).get("forward") for cls in type(module).__mro__}
    found = list(_behind(module, own))
    foreign = [function for function in found if function not in own]
    alone = [f for f in foreign if not names_of(f).isdisjoint(does_without)]
    if len(foreign) < len(found) and not alone:
        return None
    if not foreign:
        return Other(f"a {type(vars(module)['forward']).__name__}")
    function = (alone or foreign)[0]
    home = function.__globals__.get("__name__", "")
    return Other(f"{function.__code__.co_name} of {home}", frozenset(names_of(function)))


def _behind(module: nn.Module, own: Collection[Any]) -> Iterator[FunctionType]:
    """The functions that the instance's forward is made of, down to those of the class."""
    waiting: list[Any] = [vars(module)["forward"]]
    seen: list[Any] = []  # the objects themselves: an id may be used again
    for value in waiting:
        if isinstance(value, nn.Module | type) or any(value is one for one in seen):
            continue
        seen.append(value)
        if isinstance(value, FunctionType):
            yield value
            if value in own:
                continue
        waiting += _parts(value, module)


def _parts(value: Any, module: nn.Module) -> Iterator[Any]:
    """What a callable may call: what it wraps, encloses or holds, and the module's attributes."""
    if isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from filter(callable, (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, FunctionType):
        yield from filter(callable, enclosed(value).values())
        yield from filter(callable, map(vars(module).get, names_of(value)))
    elif callable(value):
        yield from filter(callable, getattr(value, "__dict__", {}).values())
