"""Functions that register operators with torch's dispatcher, as csrc/ops does."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedops import notice
from fusedops.exporting import exports_onnx

LIBRARY = torch.library.Library("fusedops", "DEF")
PURE = (torch.Tag.pt2_compliant_tag,)
RANDOM = (torch.Tag.nondeterministic_seeded, *PURE)
_public: dict[str, Callable] = {}  # operator -> its function
EXPORTS: dict[str, Any] = {}  # what fusedops._C has


def define(*schemas: str, tags: Sequence[torch.Tag] = PURE) -> None:
    for schema in schemas:
        LIBRARY.define(schema, tags=tags)


def implement(name: str, function: Callable, *, takes_nested: bool = False) -> None:
    """Registers a public operator: differentiable PyTorch, under vmap too."""

    _public[name] = _noticed(function)
    for key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
        LIBRARY.impl(name, _public[name], key)
    if not takes_nested:
        refuse = functools.partial(_refuse_nested, name)
        LIBRARY.impl(name, refuse, "CompositeImplicitAutogradNestedTensor")
    EXPORTS[name] = _short_path(name)


def export(value: Any, name: str | None = None) -> Any:
    """Puts a function or a value into fusedops._C, under its own name or another."""
    EXPORTS[name or value.__name__] = value
    return value


def implement_kernel(name: str, outputs: Callable, composite: Callable | None = None) -> None:
    """Registers a kernel operator. outputs: checks the arguments and creates the outputs.

    composite: runs on devices without a kernel.
    """
    LIBRARY.impl(name, outputs, "Meta")
    if composite is not None:
        LIBRARY.impl(name, _noticed(composite), "CompositeExplicitAutograd")


def _noticed(function: Callable) -> Callable:
    def run(*args, **kwargs):
        notice.give()
        return function(*args, **kwargs)

    return run


def has_kernel(name: str, *tensors: Tensor | None) -> bool:
    """Whether a kernel operator takes these tensors; the first one is never None.

    Function transforms, forward-mode gradients and traces can only see through PyTorch's operators.
    """
    first = tensors[0]
    key = None if first is None else {"cuda": "CUDA", "cpu": "CPU"}.get(first.device.type)
    if not key or not torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedops::{name}", key):
        return False
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not transformed and forward_ad._current_level < 0 and not torch.jit.is_tracing()


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def draw_seed(x: Tensor, dropout_p: float) -> Tensor | None:
    """A kernel's seed: follows `torch.manual_seed`, without waiting for the device."""
    if not dropout_p:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)


def with_graph(
    function: Callable, tensors: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of a function's results, which can be differentiated again."""
    pairs = zip(function(*tensors), grads, strict=True)
    outputs, directions = zip(*((o, g) for o, g in pairs if g is not None), strict=True)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    found = iter(
        torch.autograd.grad(outputs, wanted, directions, create_graph=True, allow_unused=True)
    )
    return [next(found) if t is not None and t.requires_grad else None for t in tensors]


def implement_autocast(name: str, function: Callable, *devices: str) -> None:
    """function: takes a cast to autocast's dtype, and the operator's arguments."""
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
    arguments = dict(zip(names, args, strict=False)) | kwargs
    name = next(n for n, t in arguments.items() if isinstance(t, Tensor) and t.is_nested)
    raise TypeError(f"{op}: {name} must be a dense tensor, got a nested one")


@functools.cache
def reference(family: str, name: str) -> Any:
    """A function of fusedops/references, imported at its first call."""
    return getattr(importlib.import_module(f"fusedops.references.{family}"), name)


def _short_path(name: str) -> Callable:
    """The operator as a function of positional arguments, as csrc/python/exports.h exports it.

    An ONNX export calls the operator's function, to trace its PyTorch operators.
    """
    op = getattr(torch.ops.fusedops, name).default
    arguments = op._schema.arguments
    positional = sum(not a.kwarg_only for a in arguments)
    keywords = [a.name for a in arguments[positional:]]

    @functools.wraps(op)
    def call(*args, **kwargs):
        named = dict(zip(keywords, args[positional:], strict=False))
        run = _public[name] if exports_onnx() else op
        return run(*args[:positional], **named, **kwargs)

    return call
