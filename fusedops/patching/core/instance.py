"""Checks whether a module's own `forward` attribute runs its class's forward, or makes it do so.

Python looks up the instance's attribute first. accelerate puts a wrapper there that calls the
class's forward. TRL's wrapper calls it only if it does not use its own fused head. Liger's never
calls it. transformers' tensor parallelism puts a wrapper there that holds the forward of the time
before patch; `follow_class` makes it call the class's forward of the time of the call.
"""

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fusedops.patching.core.probing import closure_values, names_of
from fusedops.patching.core.swap import fused_class, original_class

__all__ = ["Other", "follow_class", "instead"]

HELD = 64  # a longer list or dict holds data, not a forward
PARALLEL = "transformers.distributed."  # modules whose wrappers may be changed


@dataclass(frozen=True)
class Other:
    """A function that runs instead of, or around, a class's forward.

    reads: the names in its code and its helpers' code, and the strings in their closures. calls:
    whether one of them calls the class's forward.
    """

    name: str
    reads: frozenset[str] = frozenset()
    calls: bool = False

    def __str__(self) -> str:
        return f"{self.name} replaces its forward"


def instead(module: nn.Module, does_without: Collection[str] = ()) -> Other | None:
    """The function that runs instead of the class's forward; None if the class's runs.

    A wrapper is followed to the class's forward through its closure, its attributes and the names
    that it reads. does_without: attribute names; a wrapper that reads one may do the forward's work
    itself, and is returned even if it calls the class's forward.
    """
    first, class_forward = _first(module), _class_forward(module)
    if first is class_forward:
        return None
    functions = list(_behind(module, first, class_forward))
    foreign = [function for function in functions if function is not class_forward]
    alone = [f for f in foreign if not names_of(f).isdisjoint(does_without)]
    calls = len(foreign) < len(functions)
    if calls and not alone:
        return None
    if not foreign:
        return Other(f"a {type(first).__name__}")
    function = (alone or foreign)[0]
    home = function.__globals__.get("__name__", "")
    reads = frozenset().union(*map(_reads, foreign))
    return Other(f"{function.__code__.co_name} of {home}", reads, calls)


def follow_class(module: nn.Module) -> str:
    """Makes the module's own forward call its class's. Returns why it does not; empty if it does.

    Only a wrapper of transformers' tensor parallelism changes. It stays changed after unpatch, and
    then calls the original class's forward.
    """
    forward = vars(module).get("forward")
    if forward is None or _follows_class(module, forward):
        return ""
    return "the instance has its own forward"


def _follows_class(module: nn.Module, wrapper: Any) -> bool:
    if not isinstance(wrapper, FunctionType) or not wrapper.__module__.startswith(PARALLEL):
        return False
    for cell in wrapper.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # empty
            continue
        if isinstance(held, functools.partial) and held.func is _forward_of_class:
            return held.args == (module,)
        if isinstance(held, MethodType) and held.__self__ is module:
            if held.__func__ not in (_class_forward(module), original_class(module).forward):
                return False
            cell.cell_contents = functools.partial(_forward_of_class, module)
            return True
        if isinstance(held, FunctionType) and _follows_class(module, held):
            return True
    return False


def _forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _first(module: nn.Module) -> Any:
    """The forward that Python finds on the instance."""
    return vars(module).get("forward", type(module).forward)


def _class_forward(module: nn.Module) -> Any:
    """The forward that patch made, even below another library's class; else the class's."""
    cls: Any = fused_class(module) or type(module)
    return cls.forward


def _reads(function: FunctionType) -> set[str]:
    return names_of(function) | {v for v in closure_values(function).values() if isinstance(v, str)}


def _behind(module: nn.Module, first: Any, class_forward: Any) -> Iterator[FunctionType]:
    """The functions that `first` is built from, down to `class_forward`."""
    waiting: list[Any] = [first]
    seen: dict[int, Any] = {}  # keeps the objects alive: an id may be reused
    for value in waiting:
        if isinstance(value, nn.Module | type) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FunctionType):
            yield value
        if value is not class_forward:
            waiting += filter(_may_call, _parts(value, module, class_forward))


def _may_call(value: Any) -> bool:
    return callable(value) or isinstance(value, list | tuple | dict)


def _parts(value: Any, module: nn.Module, class_forward: Any) -> Iterable[Any]:
    """The objects that a callable may call, or that a list or dict contains."""
    if isinstance(value, FunctionType):
        return _called(value, module, class_forward)
    if isinstance(value, MethodType):
        return value.__func__, *_attribute_values(value.__self__)
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, list | tuple | dict):
        held = value.values() if isinstance(value, dict) else value
        return held if len(held) <= HELD else ()
    return _attribute_values(value)


def _attribute_values(value: Any) -> Iterable[Any]:
    return () if isinstance(value, nn.Module) else list(getattr(value, "__dict__", {}).values())


def _called(function: FunctionType, module: nn.Module, class_forward: Any) -> Iterator[Any]:
    """Yields the objects that a function may call.

    Yields its closure's values, the module's attributes and globals that it reads, and the class's
    forward if it reads that: `type(self).forward(self, x)`, `super().forward(x)`.
    """
    names = names_of(function)
    yield from closure_values(function).values()
    for name in names:
        yield vars(module).get(name)
        value = function.__globals__.get(name)
        # A library's functions lead everywhere, so follow only helpers in the same file.
        foreign = isinstance(value, FunctionType) and value.__module__ != function.__module__
        yield None if foreign else value
    if "forward" in names and not names.isdisjoint(("type", "__class__", "super")):
        yield class_forward
