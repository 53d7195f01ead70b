"""Views of a transformers config that name fusedops' attention or experts implementation.

Models built from one config share the object, and transformers compares, copies and saves it. So
patch leaves configs alone. A fused attention or experts module holds a view instead: it shares the
config's attributes, but names our implementation.
"""

import copy
import operator
import sys
from collections.abc import Hashable
from typing import Any, cast
from weakref import WeakValueDictionary

from torch import nn
from torch.compiler import is_compiling

__all__ = [
    "NAME",
    "config_of",
    "experts_implementation",
    "fit_experts_view",
    "fit_view",
    "gate_of",
    "implementation",
    "is_config",
    "set_view",
    "view_of",
]

NAME = "fusedops"
ATTENTION = "_attn_implementation_internal"
WEIGHTS = "_output_attentions"
EXPERTS = "_experts_implementation_internal"


class View:
    """Mixed in before a config's class: the same attributes, with our implementation's name.

    It names ours as long as the config's implementation is the one that `patch` found. So
    `set_attn_implementation` and `set_experts_implementation` work as if unpatched.
    """

    __slots__ = ("_fusedops_config",)
    _fusedops_config: Any
    _fusedops_was: str  # set on the subclass
    _fusedops_more: Any  # set on the subclass: the experts' gate

    def __init_subclass__(cls, **_: Any) -> None:
        """Skips transformers' hook, which would turn the view's class into a dataclass."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """`type(view)()` makes a plain config."""
        return cls.__mro__[cls.__mro__.index(View) + 1](*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self._fusedops_config == getattr(other, "_fusedops_config", other)

    __hash__ = None  # type: ignore[assignment]  # like a config's

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._fusedops_config, name, value)  # its setters read the config's own name

    def __delattr__(self, name: str) -> None:
        delattr(self._fusedops_config, name)

    def __copy__(self) -> Any:
        return copy.copy(self._fusedops_config)

    def __deepcopy__(self, memo: dict) -> Any:
        of = type(self)
        config = copy.deepcopy(self._fusedops_config, memo)
        return _view(cast(Any, of.__mro__[1]), config, of._fusedops_was, of._fusedops_more)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickles the config itself, so that the file loads without fusedops."""
        return operator.getitem, ([self._fusedops_config], 0)


class AttentionView(View):
    """An attention's view. It names the config's implementation if weights are requested."""

    __slots__ = ()

    @property
    def _attn_implementation(self) -> str | None:
        held = _attributes(self)
        now = held.get(ATTENTION)
        return NAME if now == type(self)._fusedops_was and not held.get(WEIGHTS) else now


class ExpertsView(View):
    """An experts module's view. Its class knows the module's gate."""

    __slots__ = ()

    @property
    def _experts_implementation(self) -> str | None:
        now = _attributes(self).get(EXPERTS)
        return NAME if now == type(self)._fusedops_was else now


# (view, config class, implementation, more) -> the class of such views, while any view exists
_classes: "WeakValueDictionary[tuple[type, type, str, Hashable], type]" = WeakValueDictionary()


def _view(kind: type[View], config: Any, was: str, more: Hashable = None) -> Any:
    new: Any = object.__new__(_class_of(kind, type(config), was, more))
    object.__setattr__(new, "__dict__", vars(config))
    object.__setattr__(new, "_fusedops_config", config)
    return new


def _class_of(kind: type[View], cls: type, was: str, more: Hashable) -> type:
    view_class = _classes.get((kind, cls, was, more))
    if view_class is None:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        namespace = {**named, "__slots__": (), "_fusedops_was": was, "_fusedops_more": more}
        view_class = cast(Any, type(cls))(cls.__name__, (kind, cls), namespace)
        _classes[kind, cls, was, more] = view_class
    return view_class


def _attributes(config: Any) -> dict[str, Any]:
    """vars(config), bypassing its own __getattribute__, which costs a microsecond."""
    return vars(config) if is_compiling() else object.__getattribute__(config, "__dict__")


def is_config(value: object) -> bool:
    """Whether the value is a transformers config. Imports nothing."""
    home = sys.modules.get("transformers.configuration_utils")
    return home is not None and isinstance(value, home.PreTrainedConfig)


def config_of(module: nn.Module) -> Any:
    """The module's config, even if the module holds a view of it; None if it has none."""
    held = vars(module).get("config")
    if isinstance(held, View):
        return held._fusedops_config
    return held if is_config(held) else None


def view_of(module: nn.Module) -> Any:
    """The view that patch gave the module; None if there is none."""
    held = vars(module).get("config")
    return held if isinstance(held, View) else None


def implementation(config: Any) -> str | None:
    """The attention set in a config, or in a view's config; None for other objects."""
    return _attributes(config).get(ATTENTION) if hasattr(config, "__dict__") else None


def experts_implementation(config: Any) -> str | None:
    """The experts implementation set in a config, or in a view's config."""
    return _attributes(config).get(EXPERTS) if hasattr(config, "__dict__") else None


def gate_of(module: nn.Module) -> Any:
    """The gate that patch recognised in the experts module; None if it did not fuse it."""
    held = vars(module).get("config")
    return type(held)._fusedops_more if isinstance(held, ExpertsView) else None


def fit_view(module: nn.Module) -> None:
    """Gives the module a view of its config that names our attention."""
    config = config_of(module)
    vars(module)["config"] = _view(AttentionView, config, implementation(config) or "")


def fit_experts_view(module: nn.Module, gate: Hashable) -> None:
    """Gives the module a view of its config that names our experts and knows the gate."""
    config = config_of(module)
    was = experts_implementation(config) or ""
    vars(module)["config"] = _view(ExpertsView, config, was, gate)


def set_view(module: nn.Module, view: Any) -> None:
    """Gives the module the view if it belongs to the module's config, else the plain config."""
    config = config_of(module)
    if config is not None:
        fits = view is not None and view._fusedops_config is config
        vars(module)["config"] = view if fits else config
