"""Tracks when each tensor storage is allocated and freed on the meta device.

Autograd, hooks, checkpointing and the operators' shapes are the real ones; only the kernels do not
run, so memory that a kernel takes and gives back inside its call is not seen.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops.patching.core.probing import OBSERVERS
from fusedops.profiling.storage.lives import Life

__all__ = ["Tracker", "on_meta"]

aten: Any = torch.ops.aten
UNWRITTEN = aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default
MOST_KNOWN = 1 << 22  # elements of integers whose values are followed
MOST_FLOATS = 1 << 16  # and of floating-point numbers
PLAIN = Tensor, torch.nn.Parameter
FEW = 8  # positions
FUSED = 1  # torch's number of its fused kernel


class Tracker(TorchDispatchMode):
    """Records the life of every storage that an operation makes while the mode is on.

    Models read a few numbers: is any position masked, does a sequence start in the middle of a row?
    So what comes from no parameter and no other unknown number is computed, on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[Life] = []
        self.now = 0
        self._alive: dict[int, tuple[Life, Any]] = {}  # by storage; the reference calls back
        self._values = WeakTensorKeyDictionary()
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
        known = self._alive.get(t.untyped_storage()._cdata)
        if known is not None:
            known[0].hold(category, module)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0] in self._values:
            return self._values[args[0]].item()
        out = self._results.of(func, args, kwargs)
        made = [out] if type(out) is Tensor else _tensors(out)
        if made:
            self._compute(func, args, kwargs, made)
        for t in made:
            self._born(t)
        return out

    def _born(self, t: Tensor, before: bool = False) -> None:
        if type(t) not in PLAIN or t.layout != torch.strided:  # patch's lazy logits have no memory
            return
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        life = Life(storage.nbytes())
        if not before:
            life.start = self.tick()
        self.lives.append(life)
        self._alive[key] = life, weakref.ref(storage, self._end_of(key))

    def _end_of(self, key: int) -> Callable[[object], None]:
        def end(_: object) -> None:
            self._alive.pop(key)[0].end = self.tick()

        return end

    def _compute(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        large = any(t.numel() > (MOST_FLOATS if _is_float(t) else MOST_KNOWN) for t in made)
        unknown = large or func in UNWRITTEN
        if unknown or not all(t in self._values for t in _tensors((args, kwargs))):
            for t in made:  # written in place
                self._values.pop(t, None)
            return
        args, kwargs = tree_map(self._value, (args, kwargs))
        out = func(*args, **kwargs)
        for t, value in zip(made, _tensors(out), strict=True):
            self._values[t] = value

    def _value(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return self._values[x] if isinstance(x, Tensor) else x


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
            known = self._known.get(key)
        except TypeError:  # not a plain tensor, or not hashable
            return func(*args, **kwargs)
        if func is aten._grouped_mm.default:
            return _grouped_mm(*args, **kwargs)
        if known is not None:
            made = [_meta(*one) for one in known]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)
        out = func(*args, **kwargs)
        made = [out] if isinstance(out, Tensor) else out
        if _is_new(func, made):
            self._known[key] = [(t.shape, t.stride(), t.dtype) for t in made]
        return out


def _meta(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, **_: object) -> Tensor:
    """torch's products by groups of rows, which on meta it has for bfloat16 alone."""
    groups = (len(offs),) if weight.dim() == 2 else ()
    return torch.empty(*groups, len(x), weight.shape[-1], dtype=x.dtype, device="meta")


def _is_new(func: Any, made: Any) -> bool:
    """Whether all that an operator returned is tensors with memory of their own."""
    schema = func._schema
    if any(one.alias_info is not None for one in (*schema.arguments, *schema.returns)):
        return False
    if not isinstance(made, list | tuple) or len(made) != len(schema.returns):
        return False
    for t in made:
        if type(t) is not Tensor or t.layout != torch.strided or t.device.type != "meta":
            return False
        whole = _meta(t.shape, t.stride(), t.dtype)
        if t.storage_offset() or t.untyped_storage().nbytes() != whole.untyped_storage().nbytes():
            return False
    return len({t.untyped_storage()._cdata for t in made}) == len(made)


def _key(x: Any) -> Any:
    """Identifies an argument: equal keys give results of equal shapes. 1, 1.0 and True differ."""
    if isinstance(x, Tensor):
        if type(x) not in PLAIN or x.layout != torch.strided:
            raise TypeError
        return x.shape, x.stride(), x.dtype, x.device
    if isinstance(x, list | tuple):
        return (*map(_key, x),)
    return type(x), x


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


@contextmanager
def on_meta(tracker: Tracker) -> Iterator[None]:
    """New tensors are on the meta device, and the tracker follows them."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        with torch.random.fork_rng([]), torch.device("meta"), tracker:
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
