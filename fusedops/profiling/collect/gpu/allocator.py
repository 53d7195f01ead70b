"""Computes what torch's caching allocator did in a step, from its statistics before and after."""

from collections.abc import Mapping
from typing import NamedTuple

from fusedops.profiling.evidence import Reserved

__all__ = ["Allocations", "allocations"]

Stats = Mapping[str, int]


class Allocations(NamedTuple):
    """Of a step: tensors that were allocated, calls of cudaMalloc, and retries after it failed."""

    tensors: float
    mallocs: float
    retries: float
    reserved: Reserved


def allocations(before: Stats, after: Stats, steps: int) -> Allocations | None:
    """None if the allocator has no statistics, as other allocators than torch's have none."""
    if not after or not steps:
        return None

    def a_step(*names: str) -> float:
        name = next((name for name in names if name in after), names[0])
        return (after.get(name, 0) - before.get(name, 0)) / steps

    return Allocations(
        tensors=a_step("allocation.all.allocated"),
        mallocs=a_step("num_device_alloc", "segment.all.allocated"),
        retries=a_step("num_alloc_retries"),
        reserved=Reserved(
            allocated=after.get("allocated_bytes.all.current", 0),
            reserved=after.get("reserved_bytes.all.current", 0),
            peak_allocated=after.get("allocated_bytes.all.peak", 0),
        ),
    )
