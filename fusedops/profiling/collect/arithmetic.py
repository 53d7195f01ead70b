"""Counts a step's floating-point operations by dtype, with the formulas of torch's counter."""

import functools
from collections import defaultdict
from contextvars import Token
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fusedops.patching.core.probing import OBSERVERS

__all__ = ["Arithmetic", "dtype_of"]


class Arithmetic(TorchDispatchMode):
    """Sees every operator below autograd that runs while it is entered.

    Operators run as they would without it. flops: dtype of the operands -> operations so far.
    seconds: of the last operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = defaultdict(int)
        self.seconds = 0.0
        self._observers: list[Token[int]] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self._observers.append(OBSERVERS.set(OBSERVERS.get() + 1))
        return self

    def __exit__(self, *error: Any) -> None:
        OBSERVERS.reset(self._observers.pop())
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        formula = _formula(func)
        if formula is None and not _has_own_kernel(func):
            with self:  # operators that are made of others, as under inference_mode
                decomposed = func.decompose(*args, **kwargs)
                if decomposed is not NotImplemented:
                    return decomposed
        start = perf_counter()
        out = func(*args, **kwargs)
        self.seconds = perf_counter() - start
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
        self.saw(func, args, kwargs, out, flops)
        return out

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, flops: int) -> None:
        """Called after every operator."""
        if flops:
            self.flops[dtype_of(args, kwargs)] += flops


@functools.cache
def _formula(func: Any) -> Any:
    """torch's formula for an operator's FLOPs; one that works in place has its twin's."""
    namespace, name = func._schema.name.split("::")
    twin = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return flop_registry.get(func._overloadpacket) or flop_registry.get(twin)


@functools.cache
def _has_own_kernel(func: Any) -> bool:
    """Whether a device has a kernel for it, whose results may differ from those of its parts."""
    keys = "CPU", "CUDA", "CompositeExplicitAutograd"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


def dtype_of(args: tuple, kwargs: dict[str, Any]) -> str:
    """Of the first floating-point tensor, else of the first tensor; empty without one."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    floats = [t for t in tensors if t.is_floating_point()] or tensors
    return str(floats[0].dtype).removeprefix("torch.") if floats else ""
