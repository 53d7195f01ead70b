"""Checks and converts every loaded state before `load_state_dict` changes anything.

torch's `load_state_dict` would cast every state to its parameter's dtype. `prepare` is its last
pre-hook. It gives torch finished states that torch does not look into, and commits all at once.
"""

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fusedops.optim.adamw.check import Misfit
from fusedops.optim.adamw.offload import home
from fusedops.optim.adamw.options import OURS, check_options
from fusedops.optim.adamw.state import Group, State, formatted

__all__ = ["Prepared", "prepare"]


class Prepared:
    """A parameter's finished state. torch's loading passes on an object of an unknown class."""

    def __init__(self, state: State) -> None:
        self.state = state


def prepare(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict in this optimizer's format, with `Prepared` states. Changes nothing.

    Raises ValueError with the parameter, the entry, what it must be and what came. Where the groups
    do not match the optimizer's, torch raises its own error.
    """
    saved, own = state_dict["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        return state_dict
    groups = [_merged(*pair) for pair in zip(saved, own, strict=True)]
    for number, group in enumerate(groups):
        _check_group(group, groups[0], number)
    found = state_dict["state"]
    prepared = {
        key: Prepared(_loaded(found[key], p, group, index, name))
        for index, (key, p, group, name) in enumerate(_parameters(groups, own))
        if key in found
    }
    return state_dict | {"state": {**found, **prepared}, "param_groups": groups}


def _merged(saved: Group, own: Group) -> Group:
    """A loaded group with the options of format that the constructor asked for."""
    return saved | {name: own[name] for name in OURS if name != "seed" or name not in saved}


def _check_group(group: Group, first: Group, number: int) -> None:
    """Raises ValueError where a step could not read the group."""
    check_options(group, first)
    for name, count in (("lr", 1), ("betas", 2), ("eps", 1), ("weight_decay", 1)):
        value = group.get(name)
        numbers = value if count == 2 and isinstance(value, tuple | list) else [value]
        if len(numbers) != count or not all(isinstance(n, Real | Tensor) for n in numbers):
            wanted = "a number" if count == 1 else "two numbers"
            got = repr(value) if name in group else "nothing"
            raise ValueError(
                f"AdamW: load_state_dict: group {number}: {name} must be {wanted}, got {got}"
            )


def _parameters(groups: list[Group], own: list[Group]) -> Iterator[tuple[Any, Tensor, Group, str]]:
    """(key in the state dict, parameter, group, its name where there is one)"""
    for group, mine in zip(groups, own, strict=True):
        names = mine.get("param_names", [""] * len(mine["params"]))
        for key, p, name in zip(group["params"], mine["params"], names, strict=True):
            yield key, p, {"amsgrad": False, **group}, name


def _loaded(state: Any, p: Tensor, group: Group, index: int, name: str) -> State:
    parameter = f"parameter {index} ({name})" if name else f"parameter {index}"
    try:
        if not isinstance(state, Mapping):
            raise Misfit("its state", "a dict", state)
        return formatted(dict(state), home(p, group), group, index) if state else {}
    except Misfit as misfit:
        raise ValueError(f"AdamW: load_state_dict: {parameter}: {misfit}") from None
    except Exception as error:
        error.add_note(f"AdamW: load_state_dict: {parameter}")
        raise
