"""Finds the roles of a step's tensors, such as gradient or activation, with hooks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from fusedops.patching.core.swap import observer

__all__ = ["AllocationWatch", "See", "cache_tensors", "local", "static_tensors"]

# (tensor, category, path of the module)
See = Callable[[Tensor, str, str], None]
DEEPEST = 6  # a cache of a cache's layers of a layer's lists


class AllocationWatch(AbstractContextManager):
    """Calls `see` for tensors when their role shows: saved for backward, gradient, output, input.

    The hooks change nothing, and a patched model stays fused. If a fused function does the work of
    a module's children, the children are not called; what it saves belongs to the module.
    """

    def __init__(self, model: nn.Module, see: See) -> None:
        self.model, self.see = model, see
        self.path: list[str] = []  # of the modules whose forward runs now
        self.classes = _classes(model)
        self._exits = ExitStack()

    def __enter__(self) -> "AllocationWatch":
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                for handle in self._hook(path, module):
                    stack.callback(handle.remove)
            for name, p in self.model.named_parameters():
                if p.requires_grad:
                    handle = p.register_post_accumulate_grad_hook(self._gradient(name))
                    stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._save, lambda saved: saved))
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def _hook(self, path: str, module: nn.Module) -> Iterator[Any]:
        @observer
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.path and module is self.model:
                for t in _tensors((args, kwargs)):
                    self.see(t, "inputs", "")
            self.path.append(path)

        @observer
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.path.pop()
            if not self.path and module is self.model:
                self._output(output)

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        # always_call: checkpointing stops a recomputation by an exception.
        yield module.register_forward_hook(leave, always_call=True)

    def _output(self, output: Any) -> None:
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if type(logits) is Tensor:  # patch's lazy logits have no memory
            self.see(logits, "logits", "")
        for t in cache_tensors(getattr(output, "past_key_values", None)):
            self.see(t, "kv_cache", "")

    def _save(self, t: Tensor) -> Tensor:
        module = self.path[-1] if self.path else ""
        # The loss, and what the model itself computes with the logits.
        is_logits = not module and t.dim() > 0 and t.shape[-1] == self.classes
        self.see(t, "logits" if is_logits else "activations", module)
        return t.detach()  # with its graph, a saved result would hold itself

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        module = name.rpartition(".")[0]

        def seen(p: Tensor) -> None:
            if p.grad is not None:
                self.see(p.grad, "gradients", module)

        return seen


def static_tensors(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[Tensor, str, str]]:
    """What a model and an optimizer hold between steps: (tensor, category, module)."""
    if model is not None:
        for name, p in model.named_parameters():
            yield local(p), "parameters", name.rpartition(".")[0]
        for name, b in model.named_buffers():
            yield local(b), "buffers", name.rpartition(".")[0]
    for parameter in _all_parameters(model, optimizer):
        yield local(parameter), "parameters", ""
        if parameter.grad is not None:
            yield local(parameter.grad), "gradients", ""
    if optimizer is not None:
        for state in optimizer.state.values():
            for t in _tensors(state):
                yield local(t), "optimizer_state", ""


def _all_parameters(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[Tensor]:
    yield from () if model is None else model.parameters()
    for group in () if optimizer is None else optimizer.param_groups:
        yield from (p for p in group["params"] if model is None or p.requires_grad)


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    return getattr(t, "_local_tensor", t)


def cache_tensors(cache: Any, deepest: int = DEEPEST) -> Iterator[Tensor]:
    """The keys and values in a cache of transformers, or in tuples of them."""
    if isinstance(cache, Tensor):
        yield cache
    elif deepest and cache is not None and not isinstance(cache, str | int | float | type):
        if isinstance(cache, list | tuple):
            inside: Any = cache
        else:
            inside = (cache if isinstance(cache, dict) else getattr(cache, "__dict__", {})).values()
        for value in inside:
            yield from cache_tensors(value, deepest - 1)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _classes(model: nn.Module) -> int:
    """How many logits a position has; -1 if the model has no head that says so."""
    give = getattr(model, "get_output_embeddings", None)
    head = give() if callable(give) else None
    return getattr(head, "out_features", None) or -1
