"""A sum that leaves its layer, and the norm of it in another module, in one pass.

The layer returns the sum, as ever. The norm of it is made with it and waits, in the thread, for the
module that norms exactly this tensor, unchanged, which then takes what waits. Which module that is,
a forward shows: the first sum of each layer waits without a norm, and the first fused norm of it is
the one that is made ahead from then on, unless nobody takes it MISSES times.

Only for tensors large enough that a second pass costs more than the lookup (`sum_pays`).
Only where there are no gradients: sum and norm made together are one node of a graph, and the
gradient that a hook sees of the sum would lack the norm's part. Nor where what is done between the
two is not seen: in inference mode, whose tensors do not count what is done to them, and where
somebody traces or transforms the model.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fusedops.patching.core.thresholds import sum_pays
from fusedops.patching.core.tracing import is_transformed

__all__ = ["made_ahead", "sum_and_norm_ahead"]

MISSES = 3
Fused = Callable[[Any, Tensor, Tensor], "tuple[Tensor, Tensor] | None"]


@dataclass(eq=False)
class Link:
    """The norm that takes a layer's sum, and how often it did not."""

    norm: "ref[nn.Module]"
    misses: int = 0


@dataclass(eq=False)
class Waiting:
    """A sum, what was true when it was made and, where the norm of it is known, that norm of it,
    for as long as there is the sum."""

    facts: tuple
    layer: "ref[nn.Module]"
    link: Link | None = None
    y: Tensor | None = None
    sum: "ref[Tensor] | None" = None

    def of(self, h: Tensor) -> "Waiting":
        self.sum = ref(h, self._gone)
        return self

    def _gone(self, _: Any) -> None:
        self.y = None


class _Thread(threading.local):
    waiting: Waiting | None = None


_thread = _Thread()
_links: "WeakKeyDictionary[nn.Module, Link]" = WeakKeyDictionary()


def sum_and_norm_ahead(layer: nn.Module, left: Any, right: Any, fused: Fused) -> Any:
    """left + right, which `layer` returns. fused: (norm, left, right) -> (y, sum), or None."""
    if not _may_wait(left, right):
        return left + right
    if (before := _thread.waiting) is not None and before.link is not None:
        before.link.misses += 1
    _thread.waiting = None
    link = _links.get(layer)
    if link is None:
        h = left + right
        _thread.waiting = Waiting(_facts(h), ref(layer)).of(h)
        return h
    norm = link.norm() if link.misses < MISSES else None
    made = None if norm is None else fused(norm, left, right)
    if norm is None or made is None:
        return left + right
    y, h = made
    _thread.waiting = Waiting((*_facts(h), *_facts_of_norm(norm)), ref(layer), link, y).of(h)
    return h


def made_ahead(norm: nn.Module, x: Tensor) -> Tensor | None:
    """The norm of x, where it was made with x."""
    waiting = None if is_compiling() else _thread.waiting
    if waiting is None or waiting.sum is None or waiting.sum() is not x:
        return None
    if is_transformed():
        return None
    link, layer = waiting.link, waiting.layer()
    if link is None:
        _thread.waiting = None
        if layer is not None and waiting.facts == _facts(x):
            _links[layer] = Link(ref(norm))
        return None
    if link.norm() is not norm or waiting.facts != (*_facts(x), *_facts_of_norm(norm)):
        return None
    _thread.waiting, link.misses = None, 0
    return waiting.y


def _may_wait(left: Any, right: Any) -> bool:
    return (
        not (is_compiling() or torch.is_grad_enabled())
        and type(left) is type(right) is Tensor
        and sum_pays(left, right)
        and _is_plain(left)
        and _is_plain(right)
        and not torch.is_inference_mode_enabled()
        and not is_transformed()
    )


def _is_plain(x: Tensor) -> bool:
    """Whether x is numbers in memory, and counts what is done to them."""
    return x.device.type in ("cpu", "cuda") and x.layout is torch.strided and not x.is_inference()


def _facts(x: Tensor) -> tuple:
    """What has to be the same at the norm as at the sum."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x._version, x.data_ptr(), x.requires_grad, torch.is_grad_enabled(), autocast, captured


def _facts_of_norm(norm: Any) -> tuple:
    regimes = getattr(norm, "_fusedops_regimes", None)
    if not regimes:  # kept from before unpatch
        return ()
    eps = getattr(norm, str(norm._fusedops_recipe.eps), None)
    own = [p for p in norm._parameters.values() if type(p) is nn.Parameter]
    return regimes, eps, [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in own]
