"""Tracks when each tensor storage is allocated and freed on the meta device.

Autograd, hooks, checkpointing and the operators' shapes are the real ones; only the kernels do not
run, so memory that a kernel allocates and frees within its call is not seen.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops.measuring.memory.allocations import Allocation
from fusedops.patching.core.probing import OBSERVERS
from fusedops.profiling.planning.values import PLAIN, Values, empty_meta, on_meta, tensors_in

__all__ = ["Tracker", "tracked"]

aten: Any = torch.ops.aten
FEW = 8  # positions
FUSED = 1  # torch's number of its fused kernel


class Tracker(TorchDispatchMode):
    """Records the life of every storage that an operation makes while the mode is on.

    values: the known numbers; operations add what they compute.
    """

    def __init__(self, values: Values | None = None) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.now = 0
        self._alive: dict[int, tuple[Allocation, Any]] = {}  # by storage; the reference calls back
        self.values = Values() if values is None else values
        self._results = Results()

    def tick(self) -> int:
        self.now += 1
        return self.now

    def add(self, t: Tensor, category: str, module: str = "") -> None:
        """A tensor that was there before; counted once."""
        self._born(t, before=True)
        self.see(t, category, module)

    def see(self, t: Tensor, category: str, module: str) -> None:
        if type(t) not in PLAIN:
            return
        allocation = self._alive.get(t.untyped_storage()._cdata)
        if allocation is not None:
            allocation[0].hold(category, module)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = self.values.run(func, args, kwargs or {}, self._results.of)
        for t in [out] if type(out) is Tensor else tensors_in(out):
            self._born(t)
        return out

    def _born(self, t: Tensor, before: bool = False) -> None:
        if type(t) not in PLAIN or t.layout != torch.strided:  # patch's lazy logits have no memory
            return
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        allocation = Allocation(storage.nbytes())
        if not before:
            allocation.start = self.tick()
        self.allocations.append(allocation)
        self._alive[key] = allocation, weakref.ref(storage, self._end_of(key))

    def _end_of(self, key: int) -> Callable[[object], None]:
        def end(_: object) -> None:
            self._alive.pop(key)[0].end = self.tick()

        return end


class Results:
    """Remembers the shapes that operators return: torch computes most of them in slow Python.

    A model's layers are alike, so almost every call of a step is a known one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, list[tuple]] = {}

    def of(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """func(*args, **kwargs), where all tensors are on the meta device."""
        try:
            key = func, _key(args), _key((*kwargs.items(),))
            remembered = self._known.get(key)
        except TypeError:  # not a plain tensor, or not hashable
            return func(*args, **kwargs)
        if func in SHAPES:
            return SHAPES[func](*args, **kwargs)
        if remembered is not None:
            tensors = [empty_meta(*layout) for layout in remembered]
            return tensors[0] if len(func._schema.returns) == 1 else tuple(tensors)
        out = func(*args, **kwargs)
        tensors = [out] if isinstance(out, Tensor) else out
        if _is_new(func, tensors):
            self._known[key] = [(t.shape, t.stride(), t.dtype) for t in tensors]
        return out


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, **_: object) -> Tensor:
    """torch's products by groups of rows, which on meta it has for bfloat16 alone."""
    groups = (len(offs),) if weight.dim() == 2 else ()
    return torch.empty(*groups, len(x), weight.shape[-1], dtype=x.dtype, device="meta")


def _ctc_loss(log_probs: Tensor, targets: Tensor, _: Any, lengths: list[int], *__: object) -> Any:
    """A loss per sequence, and what its backward needs: a row per step and sequence."""
    batch = log_probs.shape[1:-1]
    row = 2 * max(lengths) + 1
    rows = torch.empty(*batch, len(log_probs), row, dtype=log_probs.dtype, device="meta")
    return rows[..., 0, 0].clone(), rows


def _ctc_loss_backward(_: Tensor, log_probs: Tensor, *__: object) -> Tensor:
    return torch.empty_like(log_probs)


# Operators that torch lacks on meta.
SHAPES: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
}


def _is_new(func: Any, results: Any) -> bool:
    """Whether all that an operator returned is tensors with memory of their own."""
    schema = func._schema
    if any(described.alias_info is not None for described in (*schema.arguments, *schema.returns)):
        return False
    if not isinstance(results, list | tuple) or len(results) != len(schema.returns):
        return False
    for t in results:
        if type(t) is not Tensor or t.layout != torch.strided or t.device.type != "meta":
            return False
        whole = empty_meta(t.shape, t.stride(), t.dtype)
        if t.storage_offset() or t.untyped_storage().nbytes() != whole.untyped_storage().nbytes():
            return False
    return len({t.untyped_storage()._cdata for t in results}) == len(results)


def _key(x: Any) -> Any:
    """Identifies an argument: equal keys give results of equal shapes. 1, 1.0 and True differ."""
    if isinstance(x, Tensor):
        if type(x) not in PLAIN or x.layout != torch.strided:
            raise TypeError
        return x.shape, x.stride(), x.dtype, x.device
    if isinstance(x, list | tuple):
        return (*map(_key, x),)
    return type(x), x


@contextmanager
def tracked(tracker: Tracker) -> Iterator[None]:
    """New tensors are on the meta device, and the tracker follows them."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        with on_meta(tracker):
            observers = OBSERVERS.set(OBSERVERS.get() + 1)
            try:
                yield
            finally:
                OBSERVERS.reset(observers)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention, which on meta tensors never is the fused one of CPUs.

    torch decides for small tensors on the CPU whether its fused kernel takes such tensors: the
    lengths and the number of sequences do not matter to it.
    """
    small = [_small(t, t.shape[-1]) for t in (query, key, value)]
    mask = None if attn_mask is None else _small(attn_mask, FEW)
    more: Any = {"scale": scale, "enable_gqa": enable_gqa}
    choose: Any = torch._fused_sdp_choice  # torch's stub has another signature
    if choose(*small, mask, dropout_p, is_causal, **more) != FUSED:
        math = aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, **more)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    run = aten._scaled_dot_product_flash_attention_for_cpu
    return run(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _small(t: Tensor, last: int) -> Tensor:
    outer = [min(n, 2) if i == 0 else n for i, n in enumerate(t.shape[:-2])]
    shape = [*outer, min(t.shape[-2], FEW), min(t.shape[-1], last)]
    return torch.empty(shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
