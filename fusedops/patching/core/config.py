"""Config views: let one attention read another implementation from a shared config.

Models built from one config share the object, and transformers compares, copies and saves it. So
patch leaves configs alone. A fused attention holds a view instead: it shares the config's
attributes, but names our implementation.
"""

import copy
import operator
import sys
from typing import Any, cast
from weakref import WeakValueDictionary

from torch import nn
from torch.compiler import is_compiling

__all__ = [
    "NAME",
    "config_of",
    "fit_view",
    "implementation",
    "is_config",
    "set_view",
    "unmeasured_of",
    "view_of",
]

NAME = "fusedops"
ATTENTION = "_attn_implementation_internal"
WEIGHTS = "_output_attentions"


class View:
    """Mixed in before a config's class: the same attributes, with our attention's name.

    It names ours while the config still has the implementation from patch's time and no attention
    weights are requested. So `set_attn_implementation` and `output_attentions` work as if
    unpatched.
    """

    __slots__ = ("_fusedops_config",)
    _fusedops_config: Any
    _fusedops_was: str  # set on the subclass
    _fusedops_unmeasured: str  # set on the subclass: patch's argument

    def __init_subclass__(cls, **_: Any) -> None:
        """Skips transformers' hook, which would turn the view's class into a dataclass."""

    @property
    def _attn_implementation(self) -> str | None:
        held = _attributes(self)
        now = held.get(ATTENTION)
        return NAME if now == type(self)._fusedops_was and not held.get(WEIGHTS) else now

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """`type(view)()` makes a plain config."""
        return cls.__mro__[2](*args, **kwargs)

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
        return _view(config, of._fusedops_was, of._fusedops_unmeasured)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickles the config itself, so that the file loads without fusedops."""
        return operator.getitem, ([self._fusedops_config], 0)


# (config class, implementation, unmeasured) -> the class of its views, while any view exists
_classes: "WeakValueDictionary[tuple[type, str, str], type]" = WeakValueDictionary()


def _view(config: Any, was: str, unmeasured: str) -> Any:
    new: Any = object.__new__(_class_of(type(config), was, unmeasured))
    object.__setattr__(new, "__dict__", vars(config))
    object.__setattr__(new, "_fusedops_config", config)
    return new


def _class_of(cls: type, was: str, unmeasured: str) -> type:
    made = _classes.get((cls, was, unmeasured))
    if made is None:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        own = {**named, "__slots__": (), "_fusedops_was": was, "_fusedops_unmeasured": unmeasured}
        made = cast(Any, type(cls))(cls.__name__, (View, cls), own)
        _classes[cls, was, unmeasured] = made
    return made


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


def unmeasured_of(module: nn.Module) -> str:
    """patch's `unmeasured` for the module; "torch" for one that patch did not fuse."""
    return getattr(type(vars(module).get("config")), "_fusedops_unmeasured", "torch")


def fit_view(module: nn.Module, unmeasured: str = "torch") -> None:
    """Gives the module a view of its config that names our attention."""
    config = config_of(module)
    vars(module)["config"] = _view(config, implementation(config) or "", unmeasured)


def set_view(module: nn.Module, view: Any) -> None:
    """Gives the module the view if it belongs to the module's config, else the plain config."""
    config = config_of(module)
    if config is not None:
        fits = view is not None and view._fusedops_config is config
        vars(module)["config"] = view if fits else config
