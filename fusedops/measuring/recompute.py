"""Applies activation checkpointing to chosen blocks of a model inside a `with` statement."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed"]

CACHES = "past_key_values", "past_key_value", "layer_past", "use_cache"


@contextmanager
def checkpointed(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """The named blocks free what they save, and run their forward again in the backward.

    As in transformers, they get no cache of keys and values then, which a second forward would
    extend.
    """
    with ExitStack() as kept:
        for name in names:
            block = model.get_submodule(name)
            before = dict(vars(block))
            block.forward = _twice(block.forward)  # type: ignore[method-assign]
            kept.callback(_put_back, block, before)
        yield


def _put_back(block: nn.Module, before: dict[str, Any]) -> None:
    del block.forward
    if "forward" in before:
        block.forward = before["forward"]  # type: ignore[method-assign]


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        without = {name: None for name in CACHES if kwargs.get(name) is not None}
        return checkpoint(forward, *args, use_reentrant=False, **(kwargs | without))

    return run
