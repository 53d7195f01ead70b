"""Checks arguments of profile, sweep, tune and their commands, with one text for each error.

`caller` is the function's name, with which a message begins.
"""

from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = [
    "a_function",
    "a_model",
    "an_optimizer",
    "check_folders",
    "check_on_cpu",
    "check_one_of",
    "check_positive",
    "check_types",
    "check_whole",
]

Wanted = tuple[object, bool, str]  # a value, whether it fits, and what it must be


def check_types(caller: str, **arguments: Wanted) -> None:
    """Raises TypeError for the first argument that does not fit."""
    for name, (value, fits, what) in arguments.items():
        if not fits:
            raise TypeError(f"{caller}: {name} must be {what}, got {type(value).__name__}")


def a_function(value: object, what: str = "a function") -> Wanted:
    return value, callable(value), what


def a_model(value: object, optional: bool = False) -> Wanted:
    return _instance(value, nn.Module, "a torch.nn.Module", optional)


def an_optimizer(value: object, optional: bool = False) -> Wanted:
    return _instance(value, torch.optim.Optimizer, "a torch.optim.Optimizer", optional)


def _instance(value: object, kind: type, what: str, optional: bool) -> Wanted:
    fits = isinstance(value, kind) or (optional and value is None)
    return value, fits, what + " or None" * optional


def check_whole(caller: str, name: str, value: object, least: int = 1) -> None:
    """Raises ValueError for what is no integer or below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{caller}: {name} must be an integer of at least {least}, got {value}")


def check_positive(caller: str, name: str, value: Any, unit: str = "seconds") -> None:
    """Raises TypeError for what is no number, and ValueError for 0 and below."""
    check_types(caller, **{name: (value, isinstance(value, Real), unit)})
    if not value > 0:
        raise ValueError(f"{caller}: {name} must be more than 0 {unit}, got {value}")


def check_one_of(caller: str, name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ValueError for a value that is not among the choices."""
    if value not in (choices := tuple(choices)):
        raise ValueError(f"{caller}: {name} must be one of {', '.join(choices)}, got {value!r}")


def check_on_cpu(caller: str, model: nn.Module | None) -> None:
    """Raises ValueError for a model elsewhere: nothing here waits for another device's work."""
    for name, tensor in model.named_parameters() if model is not None else ():
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{caller}: model must be on the CPU, got {name} on {tensor.device}; other devices "
                "are not supported yet"
            )


def check_folders(caller: str, **paths: str | None) -> None:
    """Raises ValueError for a file whose folder does not exist, before anything is measured."""
    for name, path in paths.items():
        if not path or path == "-":
            continue
        if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{caller}: {name} must be a file in a folder that exists, got {path}")
