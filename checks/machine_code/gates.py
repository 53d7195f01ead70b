"""Judges kernels' machine code by rules, such as no spills, and lists the excused kernels."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from fnmatch import fnmatchcase

from checks.machine_code.sass import Resources

# For kernels whose work is dots: the instructions at the architecture's full rate.
TENSOR_CORES = {
    "sm_80": {"HMMA", "IMMA"},
    "sm_90": {"HGMMA", "IGMMA", "QGMMA"},
    "sm_100": {"UTCHMMA", "UTCIMMA", "UTCQMMA"},
}

REGISTERS = 65536  # per multiprocessor, on every architecture


@dataclass(frozen=True)
class Demand:
    """A family's requirements on a kernel, in addition to no spills."""

    loads: int | None = None  # the exact number of 16-byte accesses to global memory
    stores: int | None = None
    wide: bool = False  # needs both
    reads: bool = False  # needs loads
    dot: bool = False
    pure: bool = False  # no tensor core instructions of older architectures


@dataclass(frozen=True)
class Compiled:
    """A kernel as compiled by one compiler for one architecture."""

    compiler: str  # "nvcc 13.0.88"
    kernel: str
    variant: str  # which instance: a row of the table
    case: str  # which case within the row
    arch: str
    resources: Resources
    demand: Demand = Demand()
    warps: int | None = None  # per block, if the compiler knows

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.kernel, self.variant, self.case)))


@dataclass(frozen=True)
class Excuse:
    """Why kernels may spill or use local memory; `kernel` and `arch` are shell patterns."""

    kernel: str  # of Compiled.name
    arch: str
    spills: int  # at most
    reason: str

    def covers(self, kernel: Compiled) -> bool:
        named = fnmatchcase(kernel.name, self.kernel) and fnmatchcase(kernel.arch, self.arch)
        return named and kernel.resources.spills <= self.spills


ROWS_OF_512 = "a 16-bit dot takes at least 16 rows, and each warp holds all their elements"
FLOAT32 = "float32 dots are unrolled multiplications, with all operands in registers"
LOOKED_UP = "nf4 values come from a table, and a tile's values arrive in registers"
BYTES = "codes of unaligned rows are loaded one by one; only under triton 3.6"
SUMS = "the sums of a large block fill the registers; a smaller one loads more per FLOP"
OPTIONS = "options need registers too; smaller blocks load more per FLOP"
PAGES = "pages need registers for addresses; tiles of half as many keys are estimated slower"
HALF = "a bias needs registers too; tiles of 16 keys would be twice as many"
THREE_ROWS = "80 registers let a multiprocessor hold three rows; only under triton 3.6"
EXCUSES: tuple[Excuse, ...] = (
    Excuse("forward_kernel, attention, bf16, [cs]*, width = 128", "sm_80", 10, SUMS),
    Excuse("forward_kernel, attention, bf16, [cs]*, width = 128", "sm_90", 60, SUMS),
    Excuse("forward_kernel, attention, bf16, [cs]*, width = 256", "sm_90", 80, SUMS),
    Excuse("forward_kernel, attention, bf16, *, pages, width = 256", "sm_90", 122, PAGES),
    Excuse("query_kernel, attention, bf16, [cs]*, width = 64", "sm_90", 28, SUMS),
    Excuse("query_kernel, attention, bf16, [cs]*, width = 128", "sm_90", 197, SUMS),
    Excuse("query_kernel, attention, bf16, [cs]*, width = 256", "sm_90", 8, SUMS),
    Excuse("key_kernel, attention, bf16, [cs]*, width = 64", "sm_80", 17, SUMS),
    Excuse("key_kernel, attention, bf16, [cs]*, width = 64", "sm_90", 170, SUMS),
    Excuse("key_kernel, attention, bf16, [cs]*, width = 64", "sm_100", 118, SUMS),
    Excuse("key_kernel, attention, bf16, [cs]*, width = 128", "sm_90", 424, SUMS),
    Excuse("key_kernel, attention, bf16, [cs]*, width = 256", "sm_90", 154, SUMS),
    Excuse("forward_kernel, attention, bf16, bias, few *, width = 256", "sm_80", 7, HALF),
    Excuse("query_kernel, attention, bf16, [ab]*, width = 64", "sm_90", 341, OPTIONS),
    Excuse("query_kernel, attention, bf16, [ab]*, width = 128", "sm_90", 62, OPTIONS),
    Excuse("query_kernel, attention, bf16, [ab]*, width = 256", "sm_90", 518, OPTIONS),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 64", "sm_80", 34, OPTIONS),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 64", "sm_90", 197, OPTIONS),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 128", "sm_80", 30, OPTIONS),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 128", "sm_90", 436, OPTIONS),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 256", "sm_90", 499, OPTIONS),
    Excuse("forward_kernel, attention, bf16, [cs]*, width = 512", "sm_90", 12, ROWS_OF_512),
    Excuse("query_kernel, attention, bf16, [ab]*, width = 512", "sm_80", 8, ROWS_OF_512),
    Excuse("query_kernel, attention, bf16, [ab]*, width = 512", "sm_90", 43, ROWS_OF_512),
    Excuse("query_kernel, attention, bf16, [ab]*, width = 512", "sm_100", 54, ROWS_OF_512),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 512", "sm_80", 28, ROWS_OF_512),
    Excuse("key_kernel, attention, bf16, [cs]*, width = 512", "sm_80", 17, ROWS_OF_512),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 512", "sm_90", 12, ROWS_OF_512),
    Excuse("key_kernel, attention, bf16, [ab]*, width = 512", "sm_100", 14, ROWS_OF_512),
    Excuse("product_kernel, quantized linear, nf4, *, 512 rows", "sm_80", 13, LOOKED_UP),
    Excuse("product_kernel, quantized linear, nf4, fp32, 512 rows", "sm_80", 18, LOOKED_UP),
    Excuse("product_kernel, quantized linear, *8, odd rows, bf16, 16 rows", "sm_80", 14, BYTES),
    Excuse("product_kernel, quantized linear, *8, odd rows, bf16, 16 rows", "sm_90", 16, BYTES),
    Excuse("product_kernel, quantized linear, nf4, fp8 inputs, 64 rows", "sm_80", 2, LOOKED_UP),
    Excuse("backward_kernel, cross entropy, bf16, * of whole vectors, *", "*", 28, THREE_ROWS),
    Excuse("forward_kernel, attention, fp32, *, width = 64", "sm_80", 14, FLOAT32),
    Excuse("forward_kernel, attention, fp32, *, width = 64", "sm_90", 9, FLOAT32),
    Excuse("forward_kernel, attention, fp32, *, width = 64", "sm_100", 8, FLOAT32),
    Excuse("forward_kernel, attention, fp32, *, width = 128", "sm_90", 16, FLOAT32),
    Excuse("forward_kernel, attention, fp32, *, width = 128", "sm_100", 14, FLOAT32),
    Excuse("query_kernel, attention, fp32, *, width = 64", "sm_80", 7, FLOAT32),
    Excuse("query_kernel, attention, fp32, *, width = 64", "sm_90", 12, FLOAT32),
    Excuse("query_kernel, attention, fp32, *, width = 64", "sm_100", 9, FLOAT32),
    Excuse("key_kernel, attention, fp32, *, width = 64", "sm_90", 18, FLOAT32),
    Excuse("key_kernel, attention, fp32, *, width = 64", "sm_100", 18, FLOAT32),
    Excuse("key_kernel, attention, fp32, *, width = 128", "sm_80", 95, FLOAT32),
    Excuse("key_kernel, attention, fp32, *, width = 128", "sm_90", 20, FLOAT32),
    Excuse("key_kernel, attention, fp32, *, width = 128", "sm_100", 25, FLOAT32),
)


def failures(kernels: Iterable[Compiled], excuses: Sequence[Excuse] = EXCUSES) -> list[str]:
    """Returns one line per fault."""
    return [
        f"{kernel.name} on {kernel.arch}, {kernel.compiler}: {wrong}"
        for kernel in kernels
        for wrong in [*_local_memory(kernel, excuses), *_too_large(kernel), *_missing(kernel)]
    ]


def idle(
    kernels: Sequence[Compiled], patterns: Iterable[str], excuses: Sequence[Excuse] = EXCUSES
) -> list[str]:
    """One line per pattern that matches no kernel, and per unused excuse. kernels: all kernels."""
    spilling = [kernel for kernel in kernels if any(_local_memory(kernel, ()))]
    unused = [e for e in excuses if not any(e.covers(kernel) for kernel in spilling)]
    names = [kernel.kernel for kernel in kernels]
    return [f"{e} excuses nothing" for e in unused] + [
        f"no kernel is called {p}" for p in patterns if not matching(names, p)
    ]


def _local_memory(kernel: Compiled, excuses: Sequence[Excuse]) -> Iterator[str]:
    if any(excuse.covers(kernel) for excuse in excuses):
        return
    if kernel.resources.spills:
        yield f"{kernel.resources.spills} loads and stores of local memory"
    if kernel.resources.local:
        yield f"{kernel.resources.local} bytes of local memory per thread"


def _too_large(kernel: Compiled) -> Iterator[str]:
    """Whether a block needs more registers than exist; they are allocated in eights."""
    registers = -(-kernel.resources.registers // 8) * 8
    if kernel.warps is not None and registers * 32 * kernel.warps > REGISTERS:
        yield f"{kernel.resources.registers} registers in {kernel.warps} warps, of {REGISTERS}"


def _missing(kernel: Compiled) -> Iterator[str]:
    for what in ("loads", "stores"):
        expected, got = getattr(kernel.demand, what), getattr(kernel.resources, what)
        if expected is not None and expected != got:
            yield f"{got} 16-byte {what}, not {expected}"
        if (kernel.demand.wide or (kernel.demand.reads and what == "loads")) and not got:
            yield f"no 16-byte {what}"
    instructions = TENSOR_CORES[re.sub(r"[af]$", "", kernel.arch)]
    if kernel.demand.pure and not instructions.issuperset(kernel.resources.tensor_cores):
        got = ", ".join(kernel.resources.tensor_cores)
        yield f"{got}, not only {', '.join(sorted(instructions))}"
    if kernel.demand.dot and instructions.isdisjoint(kernel.resources.tensor_cores):
        got = ", ".join(kernel.resources.tensor_cores) or "no tensor core"
        yield f"{got}, none of {', '.join(sorted(instructions))}"
