"""Helpers for formulas that count the bytes an operator's call reads and writes.

A call reads each input once and writes each output once; what it changes in place counts twice. A
`Traffic` says how a call differs from that rule. fusedops.profile uses both.

Tiles of scores or logits and packed operands do not count, since a kernel keeps them in a cache.
Neither does what a matrix product reads again of its own operands. What the loops around a product
read or write again does count, in csrc/cpu's blocks.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from torch import Tensor

__all__ = ["Formula", "Traffic", "blocks", "moved", "once", "passes", "reads"]


class Traffic(NamedTuple):
    """How a call differs from the rule.

    unread: names of arguments that the call does not read. again: (distance, bytes) of what it
    reads or writes again. The distance is how many bytes were used in between, which says what
    cache they can be in.
    """

    unread: tuple[str, ...] = ()
    again: tuple[tuple[int, int], ...] = ()


Formula = Callable[..., Traffic]  # takes an operator's arguments by their names in its schema


def once(**_: object) -> Traffic:
    """The formula of an operator that follows the rule."""
    return Traffic()


def passes(*terms: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    """`again` from terms of (times, bytes each time, distance); empty ones are left out."""
    return tuple((distance, times * size) for times, size, distance in terms if times * size > 0)


def reads(times: int, *tensors: Tensor | None) -> tuple[tuple[int, int], ...]:
    """`again` of tensors that are read `times` times in all, from end to end."""
    size = moved(*tensors)
    return passes((times - 1, size, size))


def blocks(x: Tensor, rows: int) -> int:
    """How many blocks of so many rows x has; the last may be shorter."""
    return -(-x[..., 0].numel() // rows) if x.numel() else 0


def moved(*tensors: Tensor | None) -> int:
    """Bytes of the tensors' elements; an expanded tensor's are counted once."""
    return sum(_moved(tensor) for tensor in tensors if tensor is not None)


def _moved(tensor: Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    elements = prod(size for size, stride in pairs if stride or not size)
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())
