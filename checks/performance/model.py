"""Predicts how long a kernel launch takes, from its loops, its blocks and the GPU's limits.

A block of threads pays for its own loop: products, then everything else, then the loads that
nothing hides. Blocks start in order, each where one has finished. A launch takes at least as long
as its blocks do, and as each rate that all multiprocessors share.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from checks.performance.device import H200, Device

LANES = 32


@dataclass(frozen=True)
class Loop:
    """One iteration of a loop, summed over the threads of a block."""

    instructions: float  # per warp, summed over the warps
    exponentials: float = 0  # special functions, per thread, summed over the threads
    wgmma: float = 0  # FLOP by the tensor instructions of sm_90
    mma: float = 0  # FLOP by those of sm_80
    waits: int = 0  # loads whose whole latency the block waits for, one after another
    bytes: float = 0  # loaded
    ahead: float = 0  # FLOP of products that only the next iteration waits for
    under: float = 0  # instructions issued meanwhile, per warp, summed over the warps

    @property
    def intensity(self) -> float:
        """FLOP per loaded byte."""
        return (self.wgmma + self.mma) / self.bytes


@dataclass(frozen=True)
class Launch:
    """A kernel on the whole device. programs: clocks of each block of threads, in their order."""

    programs: Sequence[float] = ()
    resident: int = 1  # blocks of threads per multiprocessor
    l2: float = 0  # bytes from L2
    memory: float = 0  # bytes from and to memory
    shared: float = 0  # bytes from shared memory
    instructions: float = 0  # per warp, summed over the warps
    flop: dict[str, float] = field(default_factory=dict)  # by tensor instruction


def clocks(loop: Loop, latency: float, overlapped: bool = False, device: Device = H200) -> float:
    """Clocks of one iteration. latency: of a load, in seconds.

    overlapped: other warps' products run under this warp's exponentials, as in kernels whose warps
    are specialised. Otherwise products and the other instructions take turns, except that products
    which are in flight hide a part of what their own warps issue meanwhile.
    """
    tensor, vector = products(loop, device), others(loop, device)
    work = max(tensor, vector) if overlapped else tensor + vector - hidden(loop, device)
    return work + device.synchronisation + loop.waits * device.clocks(latency)


def start(device: Device = H200) -> float:
    """Clocks that a block of threads waits besides its tiles.

    Its own rows come from memory, then its first tile from L2, and its last store goes to L2.
    """
    return device.clocks(device.memory_latency + 2 * device.l2_latency)


def products(loop: Loop, device: Device = H200) -> float:
    return loop.wgmma / device.wgmma + loop.mma / device.mma


def hidden(loop: Loop, device: Device = H200) -> float:
    """Clocks that products in flight save."""
    under = loop.under / (device.schedulers * device.issue)
    return device.overlap * min(loop.ahead / device.wgmma, under)


def others(loop: Loop, device: Device = H200) -> float:
    issued = loop.instructions / (device.schedulers * device.issue)
    return max(issued, loop.exponentials / device.special_functions)


def limits(launch: Launch, device: Device = H200) -> dict[str, float]:
    """Limit -> the seconds that a launch takes at least because of it."""
    chip = device.multiprocessors * device.clock
    tensor = sum(flop / getattr(device, name) for name, flop in launch.flop.items())
    return {
        "blocks": schedule(launch.programs, launch.resident, device) / device.clock,
        "L2": launch.l2 / device.l2,
        "memory": launch.memory / device.memory,
        "shared memory": launch.shared / device.shared_rate / chip,
        "instructions": launch.instructions / (device.schedulers * device.issue) / chip,
        "tensor cores": tensor / chip,
    }


def schedule(programs: Sequence[float], resident: int, device: Device = H200) -> float:
    """Clocks until the last block ends, if each starts where a block ends first."""
    slots = [0.0] * (device.multiprocessors * resident)
    for program in programs:
        heapq.heapreplace(slots, slots[0] + program)
    return max(slots)


def seconds(launches: Sequence[Launch], device: Device = H200) -> float:
    return sum(device.launch + max(limits(one, device).values()) for one in launches)


def bound(launches: Sequence[Launch], device: Device = H200) -> str:
    """The limit of the launch that takes the longest."""
    all_limits = [limits(one, device) for one in launches]
    slowest = max(all_limits, key=lambda found: max(found.values()))
    return max(slowest, key=lambda name: slowest[name])


def resident(registers: int, shared: int, warps: int, device: Device = H200) -> int:
    """Blocks of threads per multiprocessor; registers are allocated in eights."""
    by_registers = device.registers // (-(-registers // 8) * 8 * LANES * warps)
    return min(by_registers, device.shared // (shared + 1024), device.warps // warps)
