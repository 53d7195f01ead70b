"""Measures the activations that each block keeps, and computes peak memory with checkpointing.

A checkpointed block keeps its inputs and results. What else it saves is freed when its forward
ends, and is there again from its recomputation, at the start of its backward, until the backward
frees it. So the step's own allocations give the peak for any choice of blocks.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedops.measuring.memory.allocations import Allocation, peak_of
from fusedops.measuring.memory.measured import watched_allocations
from fusedops.measuring.memory.profiled import Marks

__all__ = ["BlockUse", "measure_blocks"]

BEGIN, END = "begin ", "end "


@dataclass(frozen=True)
class Forward:
    """One forward of a block.

    end: when it ended. again: when its backward began to free what it saved, where checkpointing
    would have recomputed it. saved: bytes that it alone keeps between the two. more: bytes of its
    temporaries beyond that, at their peak.
    """

    end: float
    again: float
    saved: int
    more: int


class BlockUse:
    """The forwards of each block in one step, and the bytes that were alive at each time."""

    def __init__(
        self, allocations: Sequence[Allocation], forwards: Mapping[str, list[Forward]]
    ) -> None:
        self.forwards = forwards
        changes: dict[float, int] = defaultdict(int)
        for allocation in allocations:
            changes[allocation.start] += allocation.bytes
            if allocation.end < math.inf:
                changes[allocation.end] -= allocation.bytes
        self._times = sorted(changes)
        alive = accumulate(changes[time] for time in self._times)
        self._alive = torch.tensor([*alive], dtype=torch.int64, device="cpu")

    def saved(self, block: str) -> int:
        """Bytes that checkpointing a block frees between a forward and its backward."""
        return max((forward.saved for forward in self.forwards[block]), default=0)

    def peaks(self, blocks: Sequence[str]) -> Iterator[int]:
        """The peak with no block checkpointed, with the first one, the first two and so on."""
        alive, again = self._alive.clone(), []
        yield int(alive.max())
        for block in blocks:
            for forward in self.forwards[block]:
                first = bisect_left(self._times, forward.end)
                last = bisect_left(self._times, forward.again)
                alive[first:last] -= forward.saved
                again.append((last - 1, forward.saved + forward.more))
            yield max(int(alive.max()), *(int(alive[at]) + size for at, size in again), 0)


def measure_blocks(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    blocks: Mapping[str, nn.Module],
    device: torch.device,
) -> BlockUse:
    """Runs `step()` once, as `measure_memory` does. blocks: by path."""
    marks = Marks(device)

    def marked() -> None:
        with _marked(blocks, marks):
            step()

    allocations = watched_allocations(marked, model, optimizer, marks)
    spans = _spans(marks.times)
    return BlockUse(
        allocations, {path: [*_forwards(path, spans[path], allocations)] for path in blocks}
    )


@contextmanager
def _marked(blocks: Mapping[str, nn.Module], marks: Marks) -> Iterator[None]:
    """Notes when each block's forward begins and ends, and its inputs and results."""
    with ExitStack() as hooks:
        for path, block in blocks.items():

            def enter(_: Any, args: Any, kwargs: Any, path: str = path) -> None:
                marks.at(BEGIN + path)
                _share((args, kwargs), marks)

            def leave(_: Any, args: Any, output: Any, path: str = path) -> None:
                _share(output, marks)
                marks.at(END + path)

            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(leave).remove)
        yield


def _share(tree: Any, marks: Marks) -> None:
    for t in tree_leaves(tree):
        if isinstance(t, Tensor):
            marks.share(t)


def _spans(times: Sequence[tuple[str, float]]) -> dict[str, list[tuple[float, float]]]:
    """When each block's forwards began and ended."""
    begun: dict[str, float] = {}
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for label, time in times:
        if label.startswith(BEGIN):
            begun[label.removeprefix(BEGIN)] = time
        else:
            path = label.removeprefix(END)
            spans[path].append((begun[path], time))
    return spans


def _forwards(
    path: str, spans: Sequence[tuple[float, float]], allocations: Sequence[Allocation]
) -> Iterator[Forward]:
    """Forwards whose backward frees something that they alone had saved."""
    starts = [allocation.start for allocation in allocations]
    order = sorted(range(len(allocations)), key=starts.__getitem__)
    sorted_starts = [starts[i] for i in order]
    for begin, end in spans:
        first, last = bisect_left(sorted_starts, begin), bisect_right(sorted_starts, end)
        in_span = [allocations[i] for i in order[first:last]]
        saved = [
            allocation
            for allocation in in_span
            if _only_saved(allocation, path) and end < allocation.end < math.inf
        ]
        if saved:
            size = sum(allocation.bytes for allocation in saved)
            _, peak = peak_of(in_span)
            again = min(allocation.end for allocation in saved)
            yield Forward(end, again, size, max(0, peak - size))


def _only_saved(allocation: Allocation, path: str) -> bool:
    inside = f"{allocation.module}.".startswith(f"{path}.")
    return inside and allocation.category == "activations" and not allocation.shared
