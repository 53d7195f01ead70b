"""Counts a step's floating-point operations by dtype, with the formulas of torch's counter."""

from collections import defaultdict
from contextvars import Token
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fusedops.patching.core.probing import OBSERVERS

__all__ = ["Arithmetic", "dtype_of"]


class Arithmetic(TorchDispatchMode):
    """Sees every operator below autograd that runs while it is entered.

    Operators run as they would without it. flops: dtype of the operands -> operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = defaultdict(int)
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
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:  # operators that are made of others, as under inference_mode
                decomposed = func.decompose(*args, **kwargs)
                if decomposed is not NotImplemented:
                    return decomposed
        out = func(*args, **kwargs)
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
        self.saw(func, args, kwargs, out, flops)
        return out

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, flops: int) -> None:
        """Called after every operator."""
        if flops:
            self.flops[dtype_of(args, kwargs)] += flops


def dtype_of(args: tuple, kwargs: dict[str, Any]) -> str:
    """Of the first floating-point tensor, else of the first tensor; empty without one."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    floats = [t for t in tensors if t.is_floating_point()] or tensors
    return str(floats[0].dtype).removeprefix("torch.") if floats else ""
