"""Counts the bytes that each operator call reads and writes, and their reuse distance.

A tensor counts as many bytes as its elements take, at most those of its storage; views move none.
Each call of an operator reads its inputs and writes its results. Operators of torch whose traffic
differs have a rule here; fusedops' own have a formula in `fusedops/costs/<family>.py`.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusedops.backends import FAMILIES
from fusedops.costs.traffic import Formula, Traffic, moved
from fusedops.patching.models.loss.logits import LazyLogits

__all__ = ["Reuse", "formulas", "touched", "traffic"]

Touch = tuple[Tensor, int]  # a tensor, and the bytes of it that are read and written

# They write their first argument without reading it.
OVERWRITES = {
    f"aten::{name}" for name in ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_")
}
# They read as many elements of their first tensor as they write.
GATHERS = {
    f"aten::{name}"
    for name in ("embedding", "index_select", "gather", "index", "take", "_embedding_bag")
}
# They write as many elements of their first argument as the last one has.
SCATTERS = {f"aten::{name}" for name in ("index_add_", "scatter_add_", "index_put_", "scatter_")}
ALLOCATES = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}


@cache
def formulas() -> dict[str, Formula]:
    """Operator of fusedops -> its formula."""
    modules = (importlib.import_module(f"fusedops.costs.{family}") for family in FAMILIES)
    return {f"fusedops::{name}": f for module in modules for name, f in module.TRAFFIC.items()}


def traffic(func: Any, args: tuple, kwargs: dict[str, Any]) -> Traffic:
    """How a call differs from the rule. `again` is csrc/cpu's, so it is empty on other devices."""
    formula = formulas().get(func._schema.name)
    if formula is None:
        return Traffic()
    difference = formula(**_named(func, args, kwargs))
    on_cpu = all(tensor.is_cpu for tensor in _tensors((args, kwargs)))
    return difference if on_cpu else Traffic(difference.unread)


def _named(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def touched(
    func: Any, args: tuple, kwargs: dict[str, Any], out: Any, unread: tuple[str, ...] = ()
) -> Iterator[Touch]:
    """The tensors of one call with the bytes that move once. func: an OpOverload.

    unread: names of arguments that the call does not read.
    """
    name = func._schema.name
    if func.is_view or name in ALLOCATES or name in ("aten::detach", "aten::_local_scalar_dense"):
        return
    outputs = list(_tensors(out))
    written = {id(tensor) for tensor in _written(func, args, kwargs)}
    named = _named(func, args, kwargs)
    inputs = list(_tensors([value for key, value in named.items() if key not in unread]))
    seen = set()
    for index, tensor in enumerate(inputs):
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if place in seen:  # the same tensor for two arguments
            continue
        seen.add(place)
        size = moved(tensor)
        if name in GATHERS and index == 0:
            size = min(size, sum(map(moved, outputs)))
        if name in SCATTERS and index == 0:
            size = min(size, moved(inputs[-1]))
        if id(tensor) in written:
            size *= 1 if name in OVERWRITES else 2
        if size:
            yield tensor, size
    inputs_data = {tensor.untyped_storage().data_ptr() for tensor in _tensors(named)}
    for tensor in outputs:
        if tensor.untyped_storage().data_ptr() not in inputs_data and moved(tensor):
            yield tensor, moved(tensor)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors that have memory. A patched head's lazy logits have none until they are read."""
    for value in tree_leaves(values):
        if not isinstance(value, Tensor) or isinstance(value, LazyLogits):
            continue
        if value.layout == torch.strided and not value.is_meta:
            yield value


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments that the schema says are written."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from _tensors(value)


class Reuse:
    """Turns a step's touches into reuse distances.

    The distance of a touch is how many bytes were used since the same memory was used last. What a
    step touches first was used last in the step before, whose calls were the same.
    """

    def __init__(self) -> None:
        self.used = 0
        self._last: dict[int, int] = {}  # address of a storage -> bytes used before its last touch
        self._first: list[tuple[int, int, int, Callable[[int, int], None]]] = []

    def touch(self, touches: Iterable[Touch], add: Callable[[int, int], None]) -> None:
        """Calls `add(distance, bytes)` for each touch of one call, some only at `finish`."""
        for tensor, size in touches:
            address = tensor.untyped_storage().data_ptr()
            if address in self._last:
                add(self.used - self._last[address] + size, size)
            else:
                self._first.append((address, self.used, size, add))
            self.used += size
            self._last[address] = self.used

    def finish(self) -> None:
        for address, at, size, add in self._first:
            add(max(1, self.used - self._last[address] + at), size)
        self._first.clear()
