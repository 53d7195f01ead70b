"""Operator calls, modules and a context manager for tests under other default dtypes or devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contract.family import BF16, F16, F32, F64, FAMILIES, Call


@contextmanager
def default(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    """Within it, new tensors have another dtype and are on another device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


DEFAULTS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": F64},
    "bfloat16 on meta": {"dtype": BF16, "device": "meta"},
    "float16 on cpu": {"dtype": F16, "device": "cpu"},
}


@dataclass(frozen=True)
class Bound:
    """A call's function and reference, and the arguments with gradients of both."""

    operator: str
    function: Callable
    reference: Callable
    args: tuple[Tensor, ...]
    draws: tuple[Callable, ...] = ()  # references that add in another order


def bound(call: Call, dtype: torch.dtype = F32) -> Bound:
    args = call.args(6, dtype=dtype)
    references = (call.on_leaves(run, args)[0] for run in call.draws())
    return Bound(call.operator, *call.both(args), tuple(references))


CALLS = {
    f"{family} {name}": call
    for family, record in FAMILIES.items()
    for name, call in (record.calls | record.more | record.further).items()
}
