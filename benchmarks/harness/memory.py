"""Measures the peak memory of a call on the CPU, and the size of its results."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fusedops.measuring.memory.allocations import peak_of
from fusedops.measuring.memory.profiled import profiled_allocations


class Memory(NamedTuple):
    """Bytes at the peak, and bytes of the results, which are included and remain."""

    peak: int
    results: int


def profiled(call: Callable[[], object]) -> Memory:
    """Returns a CPU call's peak: the most bytes that are allocated at once, by torch's profiler.

    Memory that a library takes from the system directly is not included.
    """
    results: list[object] = []
    allocations = profiled_allocations(lambda _: results.append(call()))
    return Memory(peak_of(allocations)[1], nbytes(results[0]))


def nbytes(results: object) -> int:
    tensors = [results] if isinstance(results, Tensor) else results
    assert isinstance(tensors, (list, tuple))
    return sum(t.nbytes for t in tensors)
