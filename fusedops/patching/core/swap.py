"""Swaps the class of one module instance, and restores it.

The new class is a subclass with the original's name, so code that checks a module's class
(isinstance, `_no_split_modules`, FSDP wrap policies, hidden-state capture) still works. It is not
added to any Python module's namespace, and other instances of the original class are unaffected.
"""

import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakValueDictionary, ref

from torch import nn

from fusedops.measuring.undo import afterwards
from fusedops.patching.core.config import set_view, view_of
from fusedops.patching.core.fused_state import ATTRIBUTE, FusedState

__all__ = [
    "Unswappable",
    "active_state",
    "fused_class",
    "fused_modules",
    "has_global_hooks",
    "has_hooks",
    "is_observer",
    "new_class",
    "observer",
    "one_line",
    "original",
    "original_class",
    "overlay",
    "restore_states",
    "stacked",
    "states",
    "subclass",
    "swap",
    "unfuse",
    "unfuse_all",
    "version",
]

Hook = TypeVar("Hook", bound=Callable)

# (original class, its fused class) -> a class over both
Over = Callable[[type[nn.Module], "type[Any] | None"], type]

# () -> (the fused class's methods, with `forward`; FusedState's fields)
Build = Callable[[], tuple[dict[str, Any], dict[str, Any]]]

# (original class, its version, key) -> subclass, while a module uses it.
_subclasses: "WeakValueDictionary[tuple[type, Hashable, Hashable], type]" = WeakValueDictionary()


class Unswappable(Exception):
    """Why a module cannot be given another class."""


def subclass(original: type[nn.Module], key: Hashable, build: Build) -> type:
    """The subclass of `original` for `key`; built from `build()` on first use.

    The methods must contain `forward`: a class that wraps forwards does so when a subclass is
    created (transformers' GradientCheckpointingLayer).
    """
    place = original, version(original), key
    fused: Any = _subclasses.get(place)
    if fused is None:
        methods, fields = build()
        state = FusedState(original, **fields)
        named = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        attributes = {ATTRIBUTE: state, **_copying(original), **_construction(original)}
        fused = new_class(original, {**named, **attributes, **methods})
        state.forward = fused.forward  # its metaclass or base may have wrapped it
        _subclasses[place] = fused
    return fused


NOTHING = FusedState(nn.Module)


def active_state(module: nn.Module) -> FusedState:
    """The module's state; an empty one if it has none or if a class on top replaced its forward."""
    cls: Any = type(module)
    state = vars(module).get(ATTRIBUTE)
    if state is None:
        state = getattr(cls, ATTRIBUTE, None)
    return NOTHING if state is None or cls.forward is not state.forward else state


def version(cls: type) -> Hashable:
    """A key for a class's current methods and plain attributes, which someone may replace."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)] if nn.Module in cls.__mro__ else cls.__mro__
    return tuple(
        (name, ref(value) if isinstance(value, FunctionType) else (type(value), value))
        for base in bases
        for name, value in ((k, getattr(v, "fget", v)) for k, v in vars(base).items())
        if isinstance(value, FunctionType | int | float | str)
    )


def new_class(original: type[nn.Module], namespace: dict) -> type:
    """A subclass with the same name, made by the original's metaclass."""
    metaclass: Any = type(original)
    try:
        return metaclass(original.__name__, (original,), namespace)
    except Exception as error:
        raise Unswappable(f"its class cannot be subclassed: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """An error as one line of text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def fused_class(module: nn.Module) -> type[Any] | None:
    """The class that patch gave the module, even below another library's subclass."""
    return _fused_in(type(module))


def _fused_in(cls: type) -> type[Any] | None:
    return next((base for base in cls.__mro__ if ATTRIBUTE in vars(base)), None)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class before patch."""
    fused = fused_class(module)
    return type(module) if fused is None else fused._fusedops.original


def fused_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that run their fused forward now."""
    fused: dict[Any, Any] = {module: fused_class(module) for module in model.modules()}
    return {m for m in fused if fused[m] and (vars(m).get(ATTRIBUTE) or fused[m]._fusedops).is_on}


def swap(module: nn.Module, fused: Callable[[type[nn.Module]], type]) -> None:
    """Gives the module the class `fused(its class)`.

    If another library added a class on top of a fused one, re-enables that.
    """
    previous = fused_class(module)
    if previous is None or type(module) is previous:
        original = original_class(module)
        replacement: Any = fused(original)
        if (over := _over(previous)) and not _over(replacement):
            replacement = _covered(over, original, replacement)
        module.__class__ = replacement
    _switch_on(module)


def overlay(module: nn.Module, over: Over) -> None:
    """Puts `over(original class, fused class or None)` on the module, kept by later swaps."""
    fused = fused_class(module)
    below = fused._fusedops.below if fused and _over(fused) else fused
    swap(module, lambda original: _covered(over, original, below))


def _over(fused: type[Any] | None) -> Over | None:
    return None if fused is None else fused._fusedops.over


def _covered(over: Over, original: type[nn.Module], below: type[Any] | None) -> type:
    overlaid: Any = over(original, below)
    overlaid._fusedops.over = over
    return overlaid


def stacked(
    original: type[nn.Module],
    below: type[Any] | None,
    key: Hashable,
    methods: dict[str, Any],
    **fields: Any,
) -> type:
    """A subclass of `original` with the sites of `below`, plus these methods and fields."""

    def build() -> tuple[dict, dict]:
        sites = {} if below is None else below._fusedops.sites()
        return methods, {**sites, **fields, "below": below}

    return subclass(original, (key, below), build)


def unfuse(module: nn.Module) -> None:
    """Unfuses the module: restores its class, or disables our forward below another's class.

    The module then holds its config itself again. Idempotent.
    """
    set_view(module, None)
    fused = fused_class(module)
    if fused is None:
        return
    if type(module) is fused:
        _switch_on(module)
        module.__class__ = original_class(module)
    else:
        vars(module)[ATTRIBUTE] = fused._fusedops.off


def unfuse_all(model: nn.Module) -> None:
    """Restores the classes and configs of all modules. Idempotent."""
    for module in model.modules():
        unfuse(module)


def observer(hook: Hook) -> Hook:
    """Marks a hook that changes nothing, so that modules with it are still fused.

    If a fused function does the work of a module's children, the children and their hooks are not
    called.
    """
    hook._observes = True  # type: ignore[attr-defined]
    return hook


def is_observer(hook: Any) -> bool:
    return getattr(hook, "_observes", False)


def has_hooks(module: nn.Module) -> bool:
    """Whether something must see the module's calls: hooks, or a replaced call or forward."""
    return (
        type(module).__call__ is not nn.Module.__call__
        or "forward" in vars(module)
        or _more_than_observe(
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        or has_global_hooks()
    )


def has_global_hooks() -> bool:
    """Whether hooks of all modules, other than observers, are registered."""
    torchs = nn.modules.module
    return torchs._has_any_global_hook() and _more_than_observe(
        torchs._global_forward_hooks,
        torchs._global_forward_pre_hooks,
        torchs._global_backward_hooks,
        torchs._global_backward_pre_hooks,
    )


def _more_than_observe(*held: Mapping[int, Any]) -> bool:
    return any(held) and not all(is_observer(hook) for hooks in held for hook in hooks.values())


@contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Runs the block with the model unpatched."""
    with afterwards(functools.partial(restore_states, model, states(model))):
        unfuse_all(model)
        yield


# A module's class, its own FusedState (None if the class's holds) and its config view
State = tuple[type, FusedState | None, Any]


def states(model: nn.Module) -> dict[nn.Module, State]:
    """Each module's state, for `restore_states`."""
    return {m: (type(m), vars(m).get(ATTRIBUTE), view_of(m)) for m in model.modules()}


def restore_states(model: nn.Module, before: dict[nn.Module, State]) -> None:
    """Restore each module to its state in `before`; unfuse modules added since. Idempotent."""
    for module in set(model.modules()):
        was, state, view = before.get(module, (original_class(module), None, None))
        set_view(module, view)
        _restore_state(module, was, state)


def _restore_state(module: nn.Module, was: type, state: FusedState | None) -> None:
    now, fused, before = type(module), fused_class(module), _fused_in(was)
    refuses = before is was and now is before._fusedops.original
    if now is not was and (now is fused or refuses):
        module.__class__ = was
    elif now is not was and (fused is None or before is None):  # another library's class
        unfuse(module)
        return
    _switch_on(module)
    if state is not None:
        vars(module)[ATTRIBUTE] = state


def _switch_on(module: nn.Module) -> None:
    vars(module).pop(ATTRIBUTE, None)


def _construction(original: type[nn.Module]) -> dict:
    """Makes `type(module)(...)` build an unfused module, as no report would mention a fused one.

    It does not use `__new__`, which torch calls without `__init__` to copy a module
    (nn.DataParallel's replicas).
    """

    @functools.wraps(original.__init__)
    def __init__(self, *args, **kwargs):
        if ATTRIBUTE in vars(type(self)):  # else a user's subclass
            object.__setattr__(self, "__class__", original)
        original.__init__(self, *args, **kwargs)

    return {"__init__": __init__}


def _copying(original: type[nn.Module]) -> dict:
    """Makes pickle write the original class, which loads without fusedops.

    Deep copies stay fused; copy.copy gives the original class.
    """

    def __reduce_ex__(self, protocol):
        fused: Any = fused_class(self)
        # Protocol 2 and newer cannot pickle an object under a class other than its own.
        make, args, *rest = super(fused, self).__reduce_ex__(min(protocol, 1))
        make, *args = (original if a is fused else a for a in (make, *args))
        return make, tuple(args), *rest

    def __deepcopy__(self, memo):
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    methods = {"__reduce_ex__": __reduce_ex__}
    if not hasattr(original, "__deepcopy__"):
        methods["__deepcopy__"] = __deepcopy__
    return methods
