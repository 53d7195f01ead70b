"""Constants of NVIDIA H200 and H100 SXM GPUs, some of them estimated, for all speed predictions.

A change of a constant is a commit of its own, which also predicts the published kernels again.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU's rates. A clock is one cycle of a multiprocessor; rates are per multiprocessor."""

    # NVIDIA H100 whitepaper: SXM parts have 132 multiprocessors, four schedulers each, which issue
    # one instruction of a warp per clock, and 16 special function units for exp2 and the like.
    multiprocessors: int = 132
    schedulers: int = 4
    special_functions: int = 16
    registers: int = 65536
    shared: int = 227 * 1024
    warps: int = 64
    shared_rate: float = 128  # bytes per clock: 32 banks of 4 bytes
    clock: float = 1.755e9  # Hz; the maximum while tensor cores draw the power (1.98e9 otherwise)

    # FLOP per clock in 16 bits. The peak is 4096. Under its power limit an H200 multiplies bfloat16
    # matrices of 8192 x 8192 at 769 to 798 TFLOP/s, measured on random data: 0.83 of the peak.
    wgmma: float = 0.83 * 4096
    # mma.sync, the instruction of sm_80, reaches 0.63 of the peak on average (Luo et al.,
    # arXiv:2402.13499).
    mma: float = 0.63 * 4096

    # Two estimates. issue: the part of the issue slots that a kernel fills although its warps also
    # wait for results; 0.65 to 0.8. synchronisation: clocks per tile for barriers and for the last
    # product of a chain; 50 to 150.
    issue: float = 0.8
    synchronisation: float = 100
    # The part of a warp's other instructions that its own products in flight hide. With 0.37, a
    # FlashAttention-3 without specialised warps would make its published 570 TFLOP/s.
    overlap: float = 0.35

    # bytes/s. An H200 copies memory at 4.3e12, measured. L2 to all multiprocessors: Hopper
    # microbenchmarks give 5.5e12 to 5.7e12.
    memory: float = 4.3e12
    l2: float = 5.5e12
    # Seconds from a load to its value. Memory under load: 700 to 900 ns. L2, the third estimate:
    # 260 to 270 clocks without load (Luo et al.), more from the far half.
    memory_latency: float = 800e-9
    l2_latency: float = 150e-9
    # A fourth estimate: to make a descriptor, two round trips to L2 and a chain of 14 accesses to
    # shared memory, of 30 clocks each.
    descriptor: float = 550e-9
    launch: float = 2e-6  # to start a kernel's blocks on an idle device, and to drain them

    def clocks(self, seconds: float) -> float:
        return seconds * self.clock


H200 = Device()
