"""AdamW's load_state_dict: checks and converts all states before it changes any.

torch's `load_state_dict` would cast every state to its parameter's dtype. `prepare` runs as its
last pre-hook and wraps finished states in `Prepared`, which torch's loading does not change. So an
optimizer's states change all at once, after every check.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedops.optim.adamw.check import Misfit
from fusedops.optim.adamw.memory import Claims, separate
from fusedops.optim.adamw.offload import home
from fusedops.optim.adamw.options import OURS, check_options, check_torchs_options
from fusedops.optim.adamw.state import WRITTEN, Group, State, formatted

__all__ = ["Prepared", "prepare"]

OPERATOR = "AdamW: load_state_dict"


class Prepared:
    """A parameter's finished state. torch's loading does not change objects of unknown classes."""

    def __init__(self, state: State) -> None:
        self.state = state


@torch.no_grad()
def prepare(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Converts a state dict to this optimizer's format, with `Prepared` states. Changes nothing.

    Raises ValueError with the parameter or group, the entry, the requirement and the value. If the
    groups do not match the optimizer's, torch raises its own error.
    """
    saved, current = state_dict["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in current]:
        return state_dict
    groups = [_merged(*pair) for pair in zip(saved, current, strict=True)]
    for number, (group, mine) in enumerate(zip(groups, current, strict=True)):
        where = f"{OPERATOR}: group {number}"
        check_options(group, groups[0], where)
        check_torchs_options(group, all(p.is_meta for p in mine["params"]), where)
    states = state_dict["state"]
    if not isinstance(states, Mapping):
        raise ValueError(f"{OPERATOR}: {Misfit('state', 'a dict', states)}")
    prepared = {
        key: Prepared(_loaded(states[key], p, group, index, name))
        for index, (key, p, group, name) in enumerate(_parameters(groups, current))
        if key in states
    }
    _separate([entry.state for entry in prepared.values()], current)
    return state_dict | {"state": {**states, **prepared}, "param_groups": groups}


def _merged(saved: Group, current: Group) -> Group:
    """A loaded group with the constructor's format options."""
    return saved | {name: current[name] for name in OURS if name != "seed" or name not in saved}


def _separate(states: list[State], groups: list[Group]) -> None:
    """Copies tensors that share memory with a parameter or an earlier tensor of the states."""
    claims = Claims()
    for group in groups:
        for p in group["params"]:
            claims.claim(p)
    for state in states:
        for name in WRITTEN:
            if isinstance(state.get(name), Tensor):
                state[name] = separate(state[name], claims)


def _parameters(
    groups: list[Group], current: list[Group]
) -> Iterator[tuple[Any, Tensor, Group, str]]:
    """Yields the key in the state dict, the parameter, its group, and its name or an empty text."""
    for group, mine in zip(groups, current, strict=True):
        names = mine.get("param_names", [""] * len(mine["params"]))
        for key, p, name in zip(group["params"], mine["params"], names, strict=True):
            yield key, p, {"amsgrad": False, **group}, name


def _loaded(state: Any, p: Tensor, group: Group, index: int, name: str) -> State:
    parameter = f"parameter {index} ({name})" if name else f"parameter {index}"
    try:
        if not isinstance(state, Mapping):
            raise Misfit("its state", "a dict", state)
        return formatted(dict(state), home(p, group), group) if state else {}
    except Misfit as misfit:
        raise ValueError(f"{OPERATOR}: {parameter}: {misfit}") from None
    except Exception as error:
        error.add_note(f"{OPERATOR}: {parameter}")
        raise
