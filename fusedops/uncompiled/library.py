"""Registration of the operators in torch's dispatcher, as csrc/ops does it."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops import notice

LIBRARY = torch.library.Library("fusedops", "DEF")
PURE = (torch.Tag.pt2_compliant_tag,)
RANDOM = (torch.Tag.nondeterministic_seeded, *PURE)


def define(*schemas: str, tags: Sequence[torch.Tag] = PURE) -> None:
    for schema in schemas:
        LIBRARY.define(schema, tags=tags)


def implement(name: str, function: Callable, *, takes_nested: bool = False) -> None:
    """A public operator: differentiable PyTorch, also under vmap."""

    for key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
        LIBRARY.impl(name, _noticed(function), key)
    if not takes_nested:
        refuse = functools.partial(_refuse_nested, name)
        LIBRARY.impl(name, refuse, "CompositeImplicitAutogradNestedTensor")


def implement_kernel(name: str, outputs: Callable, composite: Callable | None = None) -> None:
    """A kernel operator. outputs: checks the arguments and makes the outputs, on any device.
    composite: runs where a device has no kernel.
    """
    LIBRARY.impl(name, outputs, "Meta")
    if composite is not None:
        LIBRARY.impl(name, _noticed(composite), "CompositeExplicitAutograd")


def _noticed(function: Callable) -> Callable:
    def run(*args, **kwargs):
        notice.give()
        return function(*args, **kwargs)

    return run


def implement_autocast(name: str, function: Callable, *devices: str) -> None:
    """function: takes a cast to autocast's dtype and the operator's arguments."""
    for device in devices:
        key = f"Autocast{device.upper()}"
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        LIBRARY.impl(name, functools.partial(_autocast, function, device, keys), key)


def _autocast(function: Callable, device: str, keys: Any, *args, **kwargs):
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor | None) -> Tensor | None:
        eligible = t is not None and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if t is not None and eligible else t

    with torch._C._ExcludeDispatchKeyGuard(keys):
        return function(cast, *args, **kwargs)


def _refuse_nested(op: str, *args, **kwargs):
    names = (a.name for a in getattr(torch.ops.fusedops, op).default._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    name = next(n for n, t in given.items() if isinstance(t, Tensor) and t.is_nested)
    raise TypeError(f"{op}: {name} must be a dense tensor, got a nested one")


@functools.cache
def reference(family: str, name: str) -> Any:
    """What a file of fusedops/functional defines. Those modules import this package first."""
    return getattr(importlib.import_module(f"fusedops.functional.{family}"), name)


def short_path(name: str) -> Callable:
    """The operator as a function of positional arguments, as csrc/python.cpp exports it."""
    op = getattr(torch.ops.fusedops, name).default
    arguments = op._schema.arguments
    positional = sum(not a.kwarg_only for a in arguments)
    keywords = [a.name for a in arguments[positional:]]

    @functools.wraps(op)
    def call(*args, **kwargs):
        named = dict(zip(keywords, args[positional:], strict=False))
        return op(*args[:positional], **named, **kwargs)

    return call
