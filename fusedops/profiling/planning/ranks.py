"""Computes one rank's memory under DDP, ZeRO and FSDP2 from one process's step.

Per rank, for N ranks, P bytes of parameters, G of gradients and S of optimizer state:

    strategy     parameters   gradients         state
    ddp          P            G + G (buckets)   S
    zero1        P            G + G (buckets)   S / N   torch's ZeroRedundancyOptimizer under DDP
    zero2        P            G / N             S / N
    zero3, fsdp  P / N        G / N             S / N

zero2, zero3, fsdp: a block's gradients are whole until the gradients of the block that follows in
backward are done, because the two overlap: one is computed while the other is sent.
zero3, fsdp: a block's parameters are whole while it runs, and while the block before it runs, which
is when they are fetched. Parameters outside of blocks (embeddings, head) stay whole from the start
to the end of backward. Activations, logits and the KV cache are those of the rank's own batch.
"""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator

from torch import Tensor, nn

from fusedops.measuring.memory.allocations import ALWAYS, Allocation
from fusedops.profiling.planning.step import FakeStep, blocks

__all__ = ["Sharding"]

ROOT = ""


class Sharding:
    """How a strategy divides a model among ranks."""

    def __init__(self, model: nn.Module, world: int, strategy: str) -> None:
        self.world = world
        self.rows = world > 1 and strategy == "fsdp"  # FSDP2 cuts rows, ZeRO the flat parameter
        self.parameters = world > 1 and strategy in ("zero3", "fsdp")
        self.gradients = world > 1 and strategy in ("zero2", "zero3", "fsdp")
        self.state = world > 1 and strategy != "ddp"
        self.buckets = world > 1 and strategy in ("ddp", "zero1")
        self.blocks = dict.fromkeys(blocks(model))
        self._block_of: dict[str, str] = {}

    def part(self, p: Tensor) -> tuple[int, ...]:
        """The shape of the first rank's part, which is the largest."""
        if self.rows and p.dim():
            return -(-p.shape[0] // self.world), *p.shape[1:]
        return (-(-p.numel() // self.world),)

    def nbytes(self, p: Tensor) -> int:
        """Bytes of a parameter that a rank keeps."""
        return math.prod(self.part(p)) * p.element_size() if self.parameters else p.nbytes

    def part_of_state(self, p: Tensor) -> tuple[int, ...]:
        return self.part(p) if self.state else tuple(p.shape)

    def block_of(self, module: str) -> str:
        blocks_by_module = self._block_of
        if module not in blocks_by_module:
            parent = module.rpartition(".")[0]
            inside = module in self.blocks or not module
            blocks_by_module[module] = module if inside else self.block_of(parent)
        return blocks_by_module[module]

    def allocations(self, model: nn.Module, run: FakeStep) -> list[Allocation]:
        """The rank's allocations."""
        allocations = [*run.allocations]
        if self.buckets:
            size = sum(
                allocation.bytes for allocation in allocations if allocation.category == "gradients"
            )
            allocations.append(Allocation(size, ALWAYS, math.inf, "gradients", "buckets"))
        if self.gradients:
            sent = self._sent(run)
            allocations = [
                part for allocation in allocations for part in self._gradient(allocation, sent)
            ]
        if self.parameters:
            allocations = [
                allocation for allocation in allocations if allocation.category != "parameters"
            ]
            for name, p in model.named_parameters():
                module = name.rpartition(".")[0]
                allocations.append(
                    Allocation(self.nbytes(p), ALWAYS, math.inf, "parameters", module)
                )
            allocations += self._gathered(model, run)
        return allocations

    def _gradient(self, allocation: Allocation, sent: dict[str, float]) -> Iterator[Allocation]:
        if allocation.category != "gradients":
            yield allocation
            return
        time = sent[self.block_of(allocation.module)]
        yield dataclasses.replace(allocation, end=min(time, allocation.end))
        if allocation.end > time:
            yield dataclasses.replace(
                allocation, bytes=-(-allocation.bytes // self.world), start=time
            )

    def _sent(self, run: FakeStep) -> dict[str, float]:
        """When each block's gradients have been sent: when the next block's are there."""
        ends = self._ends(run)
        blocks, times = [*ends], [*ends.values()]
        return dict(zip(blocks, [*times[1:], *times[-1:]], strict=True))

    def _ends(self, run: FakeStep) -> dict[str, int]:
        """When the last gradient of each block was there, in the order of backward."""
        ends: dict[str, int] = {}
        for time, module in run.gradients:
            ends[self.block_of(module)] = time
        return dict(sorted(ends.items(), key=lambda end: end[1]))

    def _gathered(self, model: nn.Module, run: FakeStep) -> Iterator[Allocation]:
        whole = dict.fromkeys([ROOT, *self.blocks], 0)
        for name, p in model.named_parameters():
            whole[self.block_of(name.rpartition(".")[0])] += p.nbytes
        done = max([run.gradients[-1][0] if run.gradients else 0, *_all(run.blocks)])
        yield _whole(whole[ROOT], 0, done)
        first = min((time for time, _ in run.gradients), default=math.inf)
        forward = sorted(
            (start, end, block)
            for block, times in run.blocks.items()
            for start, end in times
            if start < first
        )
        before = 0
        for start, end, block in forward:
            yield _whole(whole[block], before, end)
            before = start
        ends = self._ends(run)
        times = [0, 0, *ends.values()]
        for block, end in ends.items():
            if block != ROOT:
                at = bisect_left(times, end, lo=2)
                yield _whole(whole[block], max(times[at - 2], forward[-1][1]), end)


def _whole(size: int, start: float, end: float) -> Allocation:
    return Allocation(size, start, end, module="gathered")


def _all(blocks: dict[str, list[tuple[int, int]]]) -> list[int]:
    return [end for times in blocks.values() for _, end in times]
