"""Attention, AdamW and quantized_linear calls whose speed is predicted, as launches of GPU kernels.

Instruction counts, and attention's tile sizes and residency, come from the compiled kernels.
Causal attention has the shapes of benchmarks/operators/attention.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from checks.performance import cuda_loops, model
from checks.performance.device import H200, Device
from checks.performance.model import Launch, clocks
from checks.performance.triton_loops import WIDTH, Counted, counted
from fusedops.triton.attention.call import LEAST_AHEAD, Call, heads_together
from fusedops.triton.attention.decode import split

LENGTHS = (1024, 2048, 4096, 8192)
TOKENS, HEADS = 16384, 16
STEP = 10**9  # parameters of an AdamW step
ADAMW_BYTES = 10  # an element of bfloat16: parameter and two codes read and written, gradient read
WIDE = 8192
WEIGHT = WIDE * WIDE // 2  # bytes of an int4 weight
GROUPS = WIDE * WIDE // 64 * 5  # bytes of its scales and zeros
NF4_SCALES = WIDE * WIDE // 64 * 4
SCALES = {"us": 1e6, "ms": 1e3}


@dataclass(frozen=True)
class Row:
    """A predicted call. amount: FLOP or bytes, if the prediction is a speed and not a time."""

    name: str
    launches: Callable[[Device], list[Launch]]
    amount: float = 0
    unit: str = "us"

    def predicted(self, device: Device = H200) -> float:
        """The call's speed or time, in its unit."""
        taken = model.seconds(self.launches(device), device)
        return self.amount / taken / 1e12 if self.amount else taken * SCALES[self.unit]

    def bound(self, device: Device = H200) -> str:
        return model.bound(self.launches(device), device)


def causal_flop(length: int, products: int) -> float:
    """FLOP of so many products of which causal attention counts half."""
    return products * TOKENS * HEADS * length * WIDTH


def query_blocks(length: int, one: Counted) -> Iterator[tuple[int, int]]:
    """(whole tiles, tiles with a mask) of each block of queries, from last to first."""
    for first in reversed(range(0, length, one.m)):
        whole, end = (first + 1) // one.n, -(-(first + one.m) // one.n)
        yield whole, end - whole


def key_blocks(length: int, one: Counted) -> Iterator[tuple[int, int]]:
    """The same for the blocks of keys, which the later queries see."""
    for first in range(0, length, one.n):
        begin, whole = first // one.m, -(-(first + one.n - 1) // one.m)
        yield length // one.m - whole, whole - begin


def causal(length: int, one: Counted, device: Device) -> Launch:
    """One launch over all heads of a batch."""
    blocks = list((key_blocks if one.kernel == "key_kernel" else query_blocks)(length, one))
    whole, edge = (clocks(loop, device.l2_latency, False, device) for loop in (one.whole, one.edge))
    start = model.start(device) + apart(one, device)
    programs = [start + whole * w + edge * e for w, e in blocks]
    tiles = sum(w + e for w, e in blocks)
    heads = TOKENS // length * HEADS
    order = in_order(programs, heads, together(length) if one.together else 1)
    return Launch(order, one.resident, l2=tiles * heads * one.whole.bytes)


def together(length: int) -> int:
    q = torch.empty(WIDTH, dtype=torch.bfloat16).expand(TOKENS // length, HEADS, length, -1)
    return heads_together(Call.of(q, q, q, *[None] * 5, (1.0, 0.0, 0.0), (-1, 0), True))


def in_order(programs: list[float], heads: int, together: int) -> list[float]:
    """Each block of each head, as block_and_head in forward.py orders them."""
    groups = (min(together, heads - first) for first in range(0, heads, together))
    return [program for n in groups for program in programs for _ in range(n)]


def apart(one: Counted, device: Device) -> float:
    """Clocks of a block outside its loop, if it makes descriptors and its products run ahead.

    The first tile's products hide nothing. The loop's first tile and the last values are waited
    for.
    """
    if not one.descriptors:
        return 0
    waits = 2 * device.l2_latency + one.descriptors * device.descriptor
    return model.hidden(one.whole, device) + device.clocks(waits)


def attention(call: str, length: int) -> Callable[[Device], list[Launch]]:
    few = ", few keys" if call == "forward" and length < LEAST_AHEAD else ""
    return lambda device: [causal(length, one, device) for one in counted(call + few)]


def decode(batch: int, kv_heads: int, keys: int) -> Callable[[Device], list[Launch]]:
    """One query; tiles of keys and values come from memory. A second kernel joins the parts."""

    def launches(device: Device) -> list[Launch]:
        one = next(one for one in counted("decode") if one.kernel == "forward_kernel")
        parts = split(batch * kv_heads, keys, device.multiprocessors)
        wait = device.clocks(device.memory_latency)
        tile = clocks(one.whole, device.memory_latency, False, device)
        tile = max(tile, wait / one.ahead)  # these tiles are shorter than a load
        tiles = math.ceil(math.ceil(keys / one.n) / parts)
        programs = [wait + tiles * tile] * (batch * kv_heads * parts)
        read = batch * kv_heads * keys / one.n * one.whole.bytes
        first = Launch(programs, one.resident, memory=read)
        # The join reads a part's softmax terms, then its sums.
        return [first] if parts == 1 else [first, Launch([2 * wait])]

    return launches


def adamw(device: Device) -> list[Launch]:
    instructions = STEP * cuda_loops.adamw_instructions() / model.LANES
    return [Launch(instructions=instructions, memory=STEP * ADAMW_BYTES)]


def int4(rows: int) -> Callable[[Device], list[Launch]]:
    """A block's warps share rows of x, so that the L2 cache gives these least often."""

    return four_bits(rows, cuda_loops.int4_instructions, GROUPS)


def nf4(rows: int) -> Callable[[Device], list[Launch]]:
    """Each byte of codes is looked up as a word of shared memory."""
    return four_bits(rows, cuda_loops.nf4_instructions, NF4_SCALES, shared=4 * WEIGHT)


def four_bits(
    rows: int, counted: Callable[[int], float], groups: int, shared: float = 0
) -> Callable[[Device], list[Launch]]:
    """counted: instructions per byte of codes. groups: bytes of scales and zeros."""

    def launches(device: Device) -> list[Launch]:
        instructions = WEIGHT * counted(rows) / model.LANES
        of_block = {1: 32, 4: 64, 8: 64, 16: 128}[rows]  # rows of the weight, as in mma.cu
        x, read = WIDE // of_block * rows * WIDE * 2, WEIGHT + groups
        first = Launch(instructions=instructions, memory=read, l2=read + x, shared=shared)
        # More than one row: blocks share the depth, and a second kernel joins the parts.
        wait = device.clocks(device.memory_latency)
        return [first] if rows == 1 else [first, Launch([2 * wait])]

    return launches


def int8(device: Device) -> list[Launch]:
    instructions = 2 * WEIGHT * cuda_loops.int8_instructions() / model.LANES
    return [Launch(instructions=instructions, memory=2 * WEIGHT)]


TRITON_ROWS = [
    *(
        Row(f"attention {call}, causal, {length} tokens", attention(call, length),
            causal_flop(length, products), "TFLOP/s")
        for call, products in (("forward", 2), ("backward", 5))
        for length in LENGTHS
    ),
    Row("decode, batch 32, 8 of 32 heads, 4096 keys", decode(32, 8, 4096),
        32 * 8 * 4096 * WIDTH * 4, "TB/s"),
    Row("decode, batch 1, 8 of 32 heads, 1024 keys", decode(1, 8, 1024)),
]  # fmt: skip
CUDA_ROWS = [
    Row("AdamW, 1e9 parameters, bf16, 8-bit moments", adamw, unit="ms"),
    *(Row(f"int4 linear, 8192 x 8192, rows of x: {rows}", int4(rows)) for rows in cuda_loops.INT4),
    Row("int8 linear, 8192 x 8192, rows of x: 1", int8),
    *(Row(f"nf4 linear, 8192 x 8192, rows of x: {rows}", nf4(rows)) for rows in cuda_loops.NF4),
]
