"""Other projects' attention kernels: published design and speed, and a prediction of that speed.

All are 16-bit kernels on an H100 SXM, for heads of width 128. The instruction counts are estimates;
the rates and latencies are those of device.py. KERNELS are predicted well. BEYOND are not: a
backward keeps shared memory and atomic additions busy, which the model leaves out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from checks.performance import model
from checks.performance.device import H200, Device
from checks.performance.model import Launch, Loop, clocks

WIDTH = 128
LENGTHS = (1024, 2048, 4096, 8192, 16384)

# Tiles are from flash_fwd_launch_template.h of FlashAttention-2 and hopper/tile_size.h of
# FlashAttention-3; the tutorials' are the largest that they try.
PER_MASK = 3  # instructions: position, comparison, selection
PER_COPY = 8  # instructions per 16 bytes that threads copy with 64-bit addresses


@dataclass(frozen=True)
class Kernel:
    """A kernel: its tile, its tensor instruction, and what overlaps."""

    name: str
    m: int  # rows that a block of threads owns
    n: int  # rows of a tile in its loop
    wgmma: bool
    overlapped: bool  # softmax under other warps' products
    copies: bool  # threads copy tiles; otherwise the copy engine does
    heads: int
    speed: tuple[int | None, ...]  # published TFLOP/s, for LENGTHS; None without a figure
    causal: bool
    source: str
    tokens: int = 0  # in a call, or
    batch: int = 0  # the sequences in a call
    longest_first: bool = False
    products: int = 2
    # A forward has maximum, scale and subtract, exponential, sum, half of a conversion, and moves
    # and reductions.
    per_score: int = 7
    pipelines: int = 1  # loops that load ahead, each of which waits for its first tile
    ahead: bool = False  # half of the products are in flight under their own warps' softmax

    def loop(self, masked: bool) -> Loop:
        scores = self.m * self.n
        flop = 2 * self.products * scores * WIDTH
        copies = 2 * self.n * WIDTH * 2 // 16 if self.copies else 0
        per_score = self.per_score + masked * PER_MASK
        threads = scores * per_score + self.m * WIDTH + copies * PER_COPY
        return Loop(
            instructions=threads / model.LANES,
            exponentials=scores,
            wgmma=flop if self.wgmma else 0,
            mma=0 if self.wgmma else flop,
            ahead=flop / 2 if self.ahead else 0,
            under=scores * per_score / model.LANES if self.ahead else 0,
        )

    def programs(self, length: int, device: Device) -> Iterator[float]:
        whole, edge = (
            clocks(self.loop(masked), 0, self.overlapped, device) for masked in (False, True)
        )
        start = model.start(device) + device.clocks(device.l2_latency) * (self.pipelines - 1)
        # Nothing runs under the first tile's softmax.
        first_tile = self.loop(self.causal)
        start += model.hidden(first_tile, device)
        if self.overlapped:
            start += model.others(first_tile, device)
        for first in range(0, length, self.m):
            end = first + self.m if self.causal else length
            tiles, masked = -(-end // self.n), -(-self.m // self.n) if self.causal else 0
            yield start + whole * (tiles - masked) + edge * masked

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(length, published TFLOP/s)."""
        for length, speed in zip(LENGTHS, self.speed, strict=True):
            if speed is not None:
                yield length, speed

    def predicted(self, length: int, device: Device = H200) -> float:
        """TFLOP/s; half of the products count if causal."""
        heads = self.heads * (self.batch or self.tokens // length)
        programs = list(self.programs(length, device)) * heads
        if self.longest_first:
            programs.sort(reverse=True)
        flop = 2 * self.products * heads * length**2 * WIDTH
        flop /= 2 if self.causal else 1
        return flop / model.seconds([Launch(programs)], device) / 1e12


PAPER = {"tokens": 16384, "heads": 16, "source": "FlashAttention-3, arXiv:2407.08608, figures"}
FA2 = {"wgmma": False, "overlapped": False, "copies": True} | PAPER
FA3 = {"wgmma": True, "overlapped": True, "copies": False} | PAPER
TRITON = {"m": 128, "n": 64, "wgmma": True, "overlapped": False, "copies": True} | PAPER
DESCRIPTORS = {"m": 128, "n": 128, "wgmma": True, "overlapped": False, "copies": False}
KERNELS = [
    Kernel("FlashAttention-2, forward", 128, 64, **FA2, causal=False,
           speed=(350, 362, 368, 370, 370)),
    Kernel("FlashAttention-2, forward, causal", 128, 64, **FA2, causal=True,
           speed=(260, 298, 319, 333, 335)),
    Kernel("FlashAttention-3, forward", 128, 176, **FA3, causal=False,
           speed=(565, 625, 638, 646, 648)),
    Kernel("FlashAttention-3, forward, causal", 128, 128, **FA3, causal=True, longest_first=True,
           speed=(423, 521, 579, 602, 616)),
    # Table 2's is full attention with 8448 tokens.
    Kernel("FlashAttention-3 without specialised warps, forward", 128, 176,
           **FA3 | {"overlapped": False, "source": "FlashAttention-3, arXiv:2407.08608, table 2"},
           causal=False, ahead=True, speed=(None, None, None, 570, None)),
    Kernel("Triton tutorial of 2024", **TRITON, causal=False, speed=(372, 389, 389, 392, 395)),
    Kernel("Triton tutorial of 2024, causal", **TRITON, causal=True, pipelines=2,
           speed=(273, 323, 353, 369, 378)),
    Kernel("Triton tutorial with descriptors", **DESCRIPTORS, batch=4, heads=32, causal=False,
           speed=(407, 428, 460, 464, 487),
           source="github.com/facebookexperimental/triton, pull request 205"),
]  # fmt: skip
BEYOND = [
    Kernel("FlashAttention-2, backward", 128, 64, **FA2, causal=False, products=5, per_score=11,
           speed=(260, 291, 310, 318, 322)),
    Kernel("FlashAttention-3, backward", 128, 80, **FA3, causal=False, products=5, per_score=11,
           speed=(424, 501, 542, 559, 561)),
]  # fmt: skip
