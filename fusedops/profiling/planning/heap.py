"""Replays a step's allocations with malloc to see how large its heap gets.

glibc's heap keeps freed memory. Small blocks that live longer than the tensors around them leave
gaps that the next tensor does not fit in, so the heap grows beyond the tensors' peak. How far
depends on the order of all allocations: a child process calls malloc and free in that order. It
writes to no block, so the kernel gives it no memory, and models of any size can be replayed.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

__all__ = ["Event", "heap_peak"]

STEPS = 8  # the heap grows for a few steps
ORDERS = 0, 3, 5  # where the graph's blocks begin; chance decides which gaps they hit
LONGEST = 120  # seconds of a replay
ALIGNMENT = 64  # bytes, of torch's CPU tensors
PAGE = 4096
# Sizes in bytes of the small blocks that torch 2.13 allocates for a tensor. The first ones live as
# long as the tensor. Autograd's live until the backward and exist for a forward's tensors only.
# They stand for fewer and larger ones: Llama, BERT and GPT-2 had 605 to 1486 bytes per
# tensor in use after a forward, 1020 on average. These are 960 as malloc rounds them up.
OF_TENSOR = 96, 176, 32
OF_GRAPH = 16, 16, 16, 32, 32, 32, 176, 512

Event = tuple[int, int]  # (number, bytes) allocates a block, (number, 0) frees it


def heap_peak(
    before: Sequence[int], step: Sequence[Event], state: Sequence[int], backward: int, update: int
) -> int | None:
    """The most bytes that malloc holds in a process that repeats a step.

    It is the median of replays whose small blocks come in other orders. None if malloc is not
    glibc's, or no child process can run.

    before: bytes of blocks that stay. step: what a step allocates and frees; events before number
    `backward` are the forward's, those from `update` on the optimizer's. state: bytes of the
    optimizer's tensors, which the first step allocates.
    """
    if not sys.executable:  # Python is embedded
        return None
    command = [sys.executable, "-I", "-S", __file__]
    peaks = []
    for order in ORDERS:
        arguments = json.dumps([before, step, state, backward, update, order])
        try:
            run = subprocess.run(
                command,
                input=arguments,
                capture_output=True,
                text=True,
                check=True,
                timeout=LONGEST,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        peaks.append(json.loads(run.stdout))
    return median(peaks)


class Heap:
    """Allocates with glibc's malloc, and counts what it takes from the system.

    Raises RuntimeError for another C library or allocator.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._aligned, self._malloc = libc.posix_memalign, libc.malloc
        self._free, self._end = libc.free, libc.sbrk
        self._aligned.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
        self._malloc.argtypes, self._malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        self._free.argtypes, self._free.restype = (ctypes.c_void_p,), None
        self._end.argtypes, self._end.restype = (ctypes.c_ssize_t,), ctypes.c_size_t
        maps = Path("/proc/self/maps").read_text().splitlines()
        self._begin = next((int(m.partition("-")[0], 16) for m in maps if "[heap]" in m), 0)
        self._before = self._end(0)
        self._mapped = 0  # bytes outside of the heap, where a large block has pages of its own
        self.peak = 0
        if not self._begin <= self.small([PAGE])[0] < self._end(0):
            raise RuntimeError("malloc does not use the heap of the C library")

    def small(self, sizes: Sequence[int]) -> list[int]:
        return [self._malloc(size) for size in sizes]

    def tensor(self, size: int) -> tuple[list[int], int]:
        """Allocates a tensor: its blocks' addresses, and the bytes that it has outside of the heap.

        Raises MemoryError.
        """
        cell = ctypes.c_void_p()
        if self._aligned(ctypes.byref(cell), ALIGNMENT, size):
            raise MemoryError
        address, end = cell.value or 0, self._end(0)
        mapped = 0 if self._begin <= address < end else -(-(size + PAGE) // PAGE) * PAGE
        self._mapped += mapped
        self.peak = max(self.peak, end - self._before + self._mapped)
        return [address, *self.small(OF_TENSOR)], mapped

    def free(self, addresses: Sequence[int], mapped: int = 0) -> None:
        for address in addresses:
            self._free(address)
        self._mapped -= mapped


def _replay(
    before: list[int],
    step: list[Event],
    state: list[int],
    backward: int,
    update: int,
    order: int,
) -> int:
    heap = Heap()
    nodes = OF_GRAPH[order:] + OF_GRAPH[:order]
    for size in before:
        heap.tensor(size)
    births = [i for i, (_, size) in enumerate(step) if size]
    forward = sum(i < backward for i in births)
    ends = max(sum(backward <= i < update for i in births), 1)  # of graph nodes, in backward
    for number in range(STEPS):
        tensors: dict[int, tuple[list[int], int]] = {}
        graph: list[list[int]] = []
        ended = 0
        for i, (block, size) in enumerate([*step, (0, 0)]):
            if i == update and not number:
                for part in state:
                    heap.tensor(part)
            if not size:
                heap.free(*tensors.pop(block, ([],)))
                continue
            if i < backward:
                graph.append(heap.small(nodes))
            elif graph:  # the last nodes come first
                ended += 1
                while len(graph) > max(forward * (1 - ended / ends), 0):
                    heap.free(graph.pop())
            tensors[block] = heap.tensor(size)
        for small in graph:
            heap.free(small)
        for remains in tensors.values():
            heap.free(*remains)
    return heap.peak


if __name__ == "__main__":
    print(_replay(*json.load(sys.stdin)))
