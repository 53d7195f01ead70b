"""Gives one module instance another class, and gives the old class back.

The new class is a subclass with the original's name, so that whatever asks a module for its class
(isinstance, `_no_split_modules`, FSDP wrap policies, hidden-state capture) sees what it saw. It
goes into no module namespace: a second model built from the original class is untouched.
"""

import copy
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

__all__ = ["fused_class", "new_class", "original_class", "restore", "subclass", "swap"]

# (original class, key) -> subclass, for as long as a module uses it.
_subclasses: "WeakValueDictionary[tuple[type, Hashable], type]" = WeakValueDictionary()


def subclass(original: type[nn.Module], key: Hashable, namespace: Callable[[], dict]) -> type:
    """The subclass of `original` that `key` names, made of `namespace()` when it is not there yet.

    `forward` has to be in the namespace: a class that wraps it does so when the class is made
    (transformers' GradientCheckpointingLayer). `_fusedops_aside` names the instance attributes
    that switch the fused code off.
    """
    made = _subclasses.get((original, key))
    if made is None:
        named = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        own = {"_fusedops_original": original, **_copying(original)}
        made = new_class(original, {**named, **own, **namespace()})
        _subclasses[original, key] = made
    return made


def new_class(original: type[nn.Module], namespace: dict) -> type:
    """A subclass of the same name, by the original's metaclass."""
    metaclass: Any = type(original)
    return metaclass(original.__name__, (original,), namespace)


def fused_class(module: nn.Module) -> type[Any] | None:
    """The class that patch gave the module, also from below another library's subclass of it."""
    mro = type(module).__mro__
    return next((cls for cls in mro if "_fusedops_original" in vars(cls)), None)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class as it was before patch."""
    fused = fused_class(module)
    return type(module) if fused is None else fused._fusedops_original


def swap(module: nn.Module, fused: Callable[[type[nn.Module]], type]) -> None:
    """Gives the module the class `fused(its class)`; switches it on again where it has it."""
    known = fused_class(module)
    if known is None:
        module.__class__ = fused(type(module))
    else:
        _switch_on(module, known)


def restore(module: nn.Module) -> None:
    """Puts the original class back, or switches our forward off below another library's class."""
    fused = fused_class(module)
    if fused is None:
        return
    if type(module) is fused:
        module.__class__ = original_class(module)
        _switch_on(module, fused)
    else:
        vars(module).update(fused._fusedops_aside)


def _switch_on(module: nn.Module, fused: type[Any]) -> None:
    for name in fused._fusedops_aside:
        vars(module).pop(name, None)


def _copying(original: type[nn.Module]) -> dict:
    """Pickle writes the original class, so that the file loads without fusedops; copies stay."""

    def __reduce_ex__(self, protocol):
        fused: Any = fused_class(self)
        # Protocol 2 and newer pickle no object under another class than its own.
        make, args, *rest = super(fused, self).__reduce_ex__(min(protocol, 1))
        return make, tuple(original if a is fused else a for a in args), *rest

    def __deepcopy__(self, memo):
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    own = {"__reduce_ex__": __reduce_ex__}
    return own if hasattr(original, "__deepcopy__") else {**own, "__deepcopy__": __deepcopy__}
