"""A model's own copy of its transformers config, and the original back.

Models that are built from one config share the object, so what is set in it is set for all.
"""

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from fusedops.patching.attributes import MISSING

__all__ = ["ATTENTION", "Chosen", "configs_in", "give_back", "implementation", "is_config", "own"]

ATTENTION = "_attn_implementation_internal"


class Chosen(str):
    """The name of an implementation, in a config that patch has copied.

    was: what was set. original: the config that was there. before: its attributes at that time.
    Pickle writes what was set, so that the file loads without fusedops.
    """

    was: str
    original: Any
    before: dict[str, Any]

    def __new__(cls, name: str, was: str, original: Any, before: dict[str, Any]) -> "Chosen":
        new = super().__new__(cls, name)
        new.was, new.original, new.before = was, original, before
        return new

    def __reduce_ex__(self, protocol):
        return str, (self.was,)

    def __deepcopy__(self, memo):
        if torch.compiler.is_compiling():  # of a cache's constructor, which reads it
            return self
        new = Chosen(str(self), self.was, None, {})
        memo[id(self)] = new  # the original may lead back here
        new.original = copy.deepcopy(self.original, memo)
        new.before = copy.deepcopy(self.before, memo)
        return new


def is_config(value: object) -> bool:
    """Whether it is a config of transformers'. Imports nothing."""
    home = sys.modules.get("transformers.configuration_utils")
    return home is not None and isinstance(value, home.PreTrainedConfig)


def configs_in(module: nn.Module) -> dict[str, Any]:
    """The configs that a module holds, by attribute."""
    if "transformers.configuration_utils" not in sys.modules:
        return {}
    return {name: value for name, value in vars(module).items() if is_config(value)}


def implementation(config: Any) -> str | None:
    """The attention that is set, or was before patch."""
    now = getattr(config, ATTENTION, None)
    return now.was if isinstance(now, Chosen) else now


def own(model: nn.Module, name: Callable[[Any], str | None]) -> None:
    """Gives the modules copies of their configs, in which attention is `name(original config)`."""
    memo: dict[int, Any] = {}
    kept = []  # deepcopy's memo goes by id
    for module in model.modules():
        for attribute, config in configs_in(module).items():
            now = getattr(config, ATTENTION, None)
            if now is None or isinstance(now, Chosen):
                continue
            new = copy.deepcopy(config, memo)
            kept.append(config)
            for one, original in zip(_with_parts(new), _with_parts(config), strict=True):
                _choose(one, original, name(original))
            vars(module)[attribute] = new


def _choose(new: Any, original: Any, name: str | None) -> None:
    was = getattr(original, ATTENTION, None)
    if was is not None and not isinstance(was, Chosen):
        before = {k: v for k, v in vars(original).items() if k != ATTENTION and not is_config(v)}
        vars(new)[ATTENTION] = Chosen(name or was, was, original, copy.deepcopy(before))


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if is_config(value):
            yield from _with_parts(value)


def give_back(module: nn.Module, but: Collection[Any] = ()) -> None:
    """The module holds its original configs again; what was changed in a copy since, is in them.

    but: copies that stay.
    """
    for attribute, config in configs_in(module).items():
        chosen = getattr(config, ATTENTION, None)
        if isinstance(chosen, Chosen) and not any(config is one for one in but):
            for one in _with_parts(config):
                _carry(one)
            vars(module)[attribute] = chosen.original


def _carry(config: Any) -> None:
    chosen = getattr(config, ATTENTION, None)
    if isinstance(chosen, Chosen):
        own = {k: v for k, v in vars(config).items() if k != ATTENTION and not is_config(v)}
        changed = {k: v for k, v in own.items() if (v == chosen.before.get(k, MISSING)) is not True}
        vars(chosen.original).update(changed)
