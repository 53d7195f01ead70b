"""A sum that leaves its layer, and the norm of it in another module, in one pass.

The layer returns the sum, as ever. The norm of it is made with it and waits, in the thread, for the
module that norms exactly this tensor, unchanged, which then takes what waits. Which module that is,
a forward shows: the first sum of each layer waits without a norm, and the first fused norm of it is
the one that is made ahead from then on. A norm that was made and not taken is the last one made.

Nothing is made ahead where what is done between the sum and the norm may matter, beside the two:
under saved-tensor hooks (checkpoints that run a layer again, and offloading), in inference mode,
whose tensors do not count what is done to them, and where somebody traces the model.
"""

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

__all__ = ["made_ahead", "sum_and_norm_ahead"]


@dataclass(eq=False)
class Link:
    """The norm that takes a layer's sum. waits: the last one made has not been taken."""

    norm: "ref[nn.Module]"
    waits: bool = False
    off: bool = False


@dataclass(frozen=True, eq=False)
class Waiting:
    """A sum, what was true when it was made and, where the norm of it is known, that norm of it."""

    sum: "ref[Tensor]"
    facts: tuple
    layer: "ref[nn.Module]"
    link: Link | None = None
    y: Tensor | None = None


class _Thread(threading.local):
    waiting: Waiting | None = None


_thread = _Thread()
_links: "WeakKeyDictionary[nn.Module, Link]" = WeakKeyDictionary()


def sum_and_norm_ahead(layer: nn.Module, left: Tensor, right: Tensor, fused: Any) -> Tensor:
    """left + right, which `layer` returns. fused: (norm, left, right) -> (y, sum), or None."""
    if not _may_wait(left, right):
        return left + right
    link = _links.get(layer)
    if link is not None and link.waits:  # nobody took the last one
        link.waits, link.off = False, True
    norm = None if link is None or link.off else link.norm()
    made = None if norm is None or not _is_here(norm, left) else fused(norm, left, right)
    if link is None or made is None or norm is None:
        h = left + right
        _thread.waiting = Waiting(ref(h), _facts(h), ref(layer)) if link is None else None
        return h
    y, h = made
    link.waits = True
    _thread.waiting = Waiting(ref(h), (*_facts(h), _versions(norm)), ref(layer), link, y)
    return h


def made_ahead(norm: nn.Module, x: Tensor) -> Tensor | None:
    """The norm of x, where it was made with x."""
    waiting = _thread.waiting
    if waiting is None or is_compiling() or waiting.sum() is not x:
        return None
    _thread.waiting = None
    link, layer = waiting.link, waiting.layer()
    if link is None:
        if layer is not None and waiting.facts == _facts(x):
            _links[layer] = Link(ref(norm))
        return None
    if link.norm() is not norm or waiting.facts != (*_facts(x), _versions(norm)):
        return None
    link.waits = False
    return waiting.y


def _may_wait(left: Tensor, right: Tensor) -> bool:
    return (
        not is_compiling()
        and type(left) is type(right) is Tensor
        and not (left.is_inference() or right.is_inference() or torch.is_inference_mode_enabled())
        and not _has_saved_tensor_hooks()
        and not torch.jit.is_tracing()
    )


def _has_saved_tensor_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _is_here(norm: nn.Module, x: Tensor) -> bool:
    """Whether all that the norm has is in memory as it is: no shard, and nothing still to come."""
    own = [p for p in norm._parameters.values() if p is not None]
    return all(
        type(p) is nn.Parameter and p.device == x.device and p.shape == x.shape[-1:] for p in own
    )


def _facts(x: Tensor) -> tuple:
    """What has to be the same at the norm as at the sum."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return x._version, torch.is_grad_enabled(), autocast, _has_saved_tensor_hooks()


def _versions(norm: nn.Module) -> tuple:
    own = [p for p in norm._parameters.values() if p is not None]
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in own)
