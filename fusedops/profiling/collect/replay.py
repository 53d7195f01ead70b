"""Repeats and times one call of a step, by the original or the fused function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fusedops.measuring.clock import running_seconds
from fusedops.patching.core.calls import Repeat, SiteCall
from fusedops.patching.core.swap import original_class

__all__ = ["Replay", "function_call"]

SHORT_S = 100e-6  # for a shorter call, it takes too long to ask for how long other programs ran


class Replay:
    """A recorded call of a site or function: its tensors, gradient mode and autocast.

    The tensors are not copied, because later writes into them do not change how long it takes.
    Calls with the same `key` take the same time. keeps: whether what the call saves stays in memory
    until its backward; checkpointing drops it. seconds: of a call, roughly.
    """

    def __init__(self, call: SiteCall) -> None:
        assert call.repeat is not None
        repeat = call.repeat
        self.kind, self.fused, self.plain = call.kind, repeat.fused, repeat.plain
        self.gradients, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.keeps = not _is_checkpointed()
        given, self.form = tree_flatten((repeat.args, repeat.kwargs))
        self.parameters = [p for m in repeat.modules for p in m.parameters(recurse=False)]
        self.key = (
            self.kind,
            *map(_described, given),
            *map(_described, self.parameters),
            *(self.gradients, self.inference, self.cast, self.keeps, call.module.training),
        )
        self.name = original_class(call.module).__name__
        self.shapes = " ".join(str(list(t.shape)) for t in given if isinstance(t, Tensor))
        self.given = [_held(value) for value in given]
        tensors = [t for t in (*self.given, *self.parameters) if isinstance(t, Tensor)]
        self.leaves = [t for t in tensors if t.requires_grad] if self.gradients else []
        self._cotangents: list[Tensor] | None = None
        self.seconds = 0.0

    def warm_up(self, patched: bool) -> None:
        """Runs the call twice; `seconds` is how long the second one takes."""
        with self._modes():
            self._run(patched)
            self.seconds = self._timed(patched)

    def timed(self, patched: bool) -> float:
        """Seconds of a call, forward and backward, without those in which other programs ran."""
        with self._modes():
            return self._timed(patched)

    def saved_bytes(self, patched: bool) -> int:
        """Bytes that the call saves for its backward, apart from its operands and results."""
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            if t.layout is torch.strided and not t.is_meta:
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()  # with its graph, a saved result would hold itself

        with self._modes(), saved_tensors_hooks(pack, lambda t: t):
            outputs = self._forward(patched)
        others = (*self.given, *self.parameters, *tree_leaves(outputs))
        for t in others:
            if isinstance(t, Tensor) and t.layout is torch.strided:
                sizes.pop(t.untyped_storage().data_ptr(), None)
        return sum(sizes.values())

    def step(self, patched: bool) -> Callable[[], None]:
        """The call as a function, forward and backward."""

        def run() -> None:
            with self._modes():
                self._run(patched)

        return run

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients):
            yield

    def _timed(self, patched: bool) -> float:
        if 0.0 < self.seconds < SHORT_S:
            start = perf_counter()
            self._run(patched)
            return perf_counter() - start
        return running_seconds(partial(self._run, patched))

    def _forward(self, patched: bool) -> Any:
        args, kwargs = tree_unflatten(self.given, self.form)
        cast = nullcontext() if self.cast is None else torch.autocast("cpu", self.cast)
        with cast:
            return (self.fused if patched else self.plain)(*args, **kwargs)

    def _run(self, patched: bool) -> None:
        results = tree_leaves(self._forward(patched))
        outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
        if outputs and self.leaves:
            if self._cotangents is None:
                self._cotangents = [torch.ones_like(t) for t in outputs]
            torch.autograd.grad(outputs, self.leaves, self._cotangents, allow_unused=True)


def function_call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Replay:
    """The call of a function of torch; it is repeated in the same way patched or not."""
    name = getattr(function, "__name__", "")
    repeat = Repeat(function, function, args, kwargs)
    return Replay(SiteCall(name, nn.Identity(), repeat, "", None, 0, 0))


def _is_checkpointed() -> bool:
    """Whether checkpointing runs the forward again, or will: it packs what is saved by hooks."""
    again = torch._C._current_autograd_node() is not None
    return again or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _held(value: Any) -> Any:
    """A tensor apart from the graph that made it; other values as they are."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        form = tuple(value.shape), value.stride(), value.dtype, value.device.type
        return *form, value.requires_grad
    if isinstance(value, nn.Module):
        return original_class(value)
    return value if isinstance(value, bool | int | float | str | type(None)) else type(value)
