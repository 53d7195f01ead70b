"""Checks the entries of an AdamW state that is loaded."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fusedops.optim.adamw.shard import is_dtensor, local

__all__ = [
    "MISSING",
    "Misfit",
    "check_entry",
    "check_numbers",
    "check_step",
    "described",
    "number_of",
]

MISSING = object()  # marks an entry that a state lacks


class Misfit(ValueError):
    """A state's entry does not fit. The message has its name, the requirement and the value."""

    def __init__(self, entry: str, expected: str, got: object) -> None:
        super().__init__(f"{entry} must be {expected}, got {described(got)}")


def check_entry(entry: str, value: Any, p: Tensor, *kinds: str) -> None:
    """Raises Misfit unless value is a dense tensor of p's shape with one of these dtypes.

    kinds: names of dtypes; "floating-point" and "complex" mean all such dtypes.
    """
    fits = _is_dense(value, p.is_meta) and _shape(value, p) in (p.shape, local(p).shape)
    if not fits or not any(_is_kind(value, kind) for kind in kinds):
        raise Misfit(entry, f"{' or '.join(kinds)} {list(p.shape)}", value)


def check_numbers(entry: str, value: Any, p: Tensor, count: int, kind: str) -> None:
    """Raises Misfit unless value is a dense tensor with `count` elements on this rank."""
    if (
        not _is_dense(value, p.is_meta)
        or local(value).numel() != count
        or not _is_kind(value, kind)
    ):
        raise Misfit(entry, f"{kind} [{count}]", value)


def check_step(step: Any, p: Tensor) -> None:
    """Raises Misfit unless the step is a number of 0 or more, or a tensor with one."""
    number = number_of(step, p.is_meta)
    if isinstance(number, bool) or not 0 <= number < math.inf:
        raise Misfit("step", "a finite number of 0 or more", step)


def number_of(value: Any, on_meta: bool) -> Any:
    """A real number, or a one-element tensor's value; NaN for anything else.

    on_meta: whether to accept a meta tensor, whose value is taken as 0.
    """
    if isinstance(value, Tensor):
        single = _is_dense(value, on_meta) and value.numel() == 1
        value = _only_number(value) if single else None
    return value if isinstance(value, Real) else math.nan


def _only_number(t: Tensor) -> Any:
    return 0 if t.is_meta else local(t).item()


def _is_dense(value: Any, on_meta: bool) -> bool:
    """Whether a value is a dense tensor, with data unless it may be on meta."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return dense and (on_meta or not value.is_meta)


def _shape(value: Tensor, p: Tensor) -> torch.Size | None:
    """Its shape; None for a DTensor sharded unlike p, because loading does not redistribute."""
    if is_dtensor(value) and value.to_local().shape != local(p).shape:
        return None
    return value.shape


def _is_kind(t: Tensor, kind: str) -> bool:
    if kind == "floating-point":
        return t.is_floating_point()
    return t.is_complex() if kind == "complex" else _short(t.dtype) == kind


def described(value: object) -> str:
    """A value for an error message: a tensor's dtype and shape, or an object's type."""
    if value is MISSING:
        return "nothing"
    if not isinstance(value, Tensor):
        plain = value is None or isinstance(value, str | bool | int | float | complex)
        return repr(value)[:80] if plain else type(value).__name__
    if value.is_nested:  # its shape is not a list of ints
        return f"nested {_short(value.dtype)}"
    text = f"{_short(value.dtype)} {list(value.shape)}"
    if is_dtensor(value):
        text += f" with {list(value.to_local().shape)} on this rank"
    if value.layout != torch.strided:
        return f"{_short(value.layout)} {text}"
    if value.is_meta:
        return f"{text} on meta"
    return f"{text} of {_only_number(value)!r}" if value.numel() == 1 else text


def _short(name: object) -> str:
    return str(name).removeprefix("torch.")
