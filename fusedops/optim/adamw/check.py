"""Checks of a loaded state's entries, and the error that names what was wanted and what came."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fusedops.optim.adamw.shard import local

__all__ = ["MISSING", "Misfit", "check_entry", "check_numbers", "check_step"]

MISSING = object()  # stands for an entry that a state lacks


class Misfit(ValueError):
    """An entry of a state that cannot be loaded."""

    def __init__(self, entry: str, wanted: str, got: object) -> None:
        super().__init__(f"{entry} must be {wanted}, got {_described(got)}")


def check_entry(entry: str, value: Any, p: Tensor, *kinds: str) -> None:
    """Raises Misfit unless value is a dense tensor of p's shape whose dtype is one of the kinds.

    kinds: names of dtypes; "floating-point" and "complex" stand for all such dtypes.
    """
    fits = _is_dense(value, p) and _shape(value, p) in (p.shape, local(p).shape)
    if not fits or not any(_is_kind(value, kind) for kind in kinds):
        raise Misfit(entry, f"{' or '.join(kinds)} {list(p.shape)}", value)


def check_numbers(entry: str, value: Any, p: Tensor, count: int, kind: str) -> None:
    """Raises Misfit unless value is a dense tensor with `count` elements on this rank."""
    if not _is_dense(value, p) or local(value).numel() != count or not _is_kind(value, kind):
        raise Misfit(entry, f"{kind} [{count}]", value)


def check_step(step: Any, p: Tensor) -> None:
    """Raises Misfit unless the step is a number of 0 or more, or a tensor with one."""
    number = step
    if isinstance(step, Tensor):
        number = _only_number(step) if _is_dense(step, p) and step.numel() == 1 else None
    real = isinstance(number, Real) and not isinstance(number, bool)
    if not (real and 0 <= number < math.inf):
        raise Misfit("step", "a finite number of 0 or more", step)


def _only_number(t: Tensor) -> Any:
    return 0 if t.is_meta else local(t).item()


def _is_dense(value: Any, p: Tensor) -> bool:
    """Whether a value is a dense tensor, and has numbers where p has."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    return dense and (p.is_meta or not value.is_meta)


def _shape(value: Tensor, p: Tensor) -> torch.Size | None:
    """Its shape; None for a DTensor that is cut unlike p, as a load does not redistribute."""
    if isinstance(value, DTensor) and value.to_local().shape != local(p).shape:
        return None
    return value.shape


def _is_kind(t: Tensor, kind: str) -> bool:
    if kind == "floating-point":
        return t.is_floating_point()
    return t.is_complex() if kind == "complex" else _short(t.dtype) == kind


def _described(value: object) -> str:
    if value is MISSING:
        return "nothing"
    if not isinstance(value, Tensor):
        plain = value is None or isinstance(value, str | bool | int | float | complex)
        return repr(value)[:80] if plain else type(value).__name__
    text = f"{_short(value.dtype)} {list(value.shape)}"
    if isinstance(value, DTensor):
        text += f" with {list(value.to_local().shape)} on this rank"
    if value.layout != torch.strided:
        return f"{_short(value.layout)} {text}"
    if value.is_meta:
        return f"{text} on meta"
    return f"{text} of {_only_number(value)!r}" if value.numel() == 1 else text


def _short(name: object) -> str:
    return str(name).removeprefix("torch.")
