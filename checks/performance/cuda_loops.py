"""Compiles the AdamW and quantized_linear CUDA kernels, and counts their main loops' instructions.

AdamW's kernel decides at run time which formats it reads. In a copy of its source the tests for the
format are constants, so its count lacks a few comparisons per block. mma.cu has a kernel for each
format.
"""

import re
from collections.abc import Mapping
from functools import cache

from checks.machine_code import BUILD, nvcc, sass
from checks.machine_code.gates import Compiled
from checks.performance import model
from checks.performance.sass_loops import Instruction, executed, loops, parsed

ADAMW = "csrc/cuda/adamw/step.cu"
MMA_WARPS = 8  # of a block of mma.cu
MMA = "csrc/cuda/quantized_linear/mma.cu"

# Patterns in the source -> what a block of 256 elements of a large bfloat16 parameter with 8-bit
# moments makes of them. A tensor's factors, which a warp computes once, are only loaded.
BF16_INT8 = {
    r"\bt\.dtype\b": "Dtype::bfloat16",
    r"\bt\.moments\b": "Moments::int8",
    r"\bt\.rounding\b": "Rounding::stochastic",
    r"\bt\.max_exp_avg_sq != nullptr": "false",
    r"step_block<kParam, kMoments, false>\(.*?\);": "return;",
    r"= step_of\(.*?\);": "= *reinterpret_cast<const Step*>(a.squares);",
}
# Rows of bfloat16 -> mma.cu's kernel for int4 codes in groups of 64.
INT4 = {
    1: "multiply<bf16, int4, 2, 1, 1, true>",
    4: "multiply<bf16, int4, 2, 1, 1, false>",
    8: "multiply<bf16, int4, 1, 1, 2, false>",
    16: "multiply<bf16, int4, 1, 2, 2, false>",
}
INT8 = "multiply<bf16, int8, 2, 1, 1, true>"  # one row
NF4 = {rows: kernel.replace("int4", "nf4") for rows, kernel in INT4.items()}


def adamw_instructions() -> float:
    """Instructions per element and thread of a step in bfloat16 with 8-bit moments."""
    return longest(ADAMW, BF16_INT8, "adamw_step") / 8  # a lane has 8 elements


def int4_instructions(rows: int = 1) -> float:
    """Instructions per byte of int4 codes and thread, for rows of bfloat16."""
    loop = products(INT4[rows])
    loads = 1 if rows <= 4 else 2  # of 16 bytes of codes, each with a zero, one byte
    zeros = sum(one.op == "LDG.E.U8" for one in loop)
    return len(loop) / (zeros / loads * 16)


def int8_instructions() -> float:
    """The same for one row by int8 codes. Each product takes 8 bytes."""
    loop = products(INT8)
    return len(loop) / (sum(one.name == "HMMA" for one in loop) * 8)


def nf4_instructions(rows: int = 1) -> float:
    """The same for rows of bfloat16 by nf4 codes. Each byte is one load from shared memory."""
    loop = products(NF4[rows])
    return len(loop) / sum(one.name == "LDS" for one in loop)


def products(kernel: str) -> list[Instruction]:
    """What a thread executes in one iteration of a mma.cu kernel's loop."""
    runs = (list(executed(loop)) for loop in loops(parsed(machine_code(MMA, ())[kernel])))
    return next(run for run in runs if any(one.name == "HMMA" for one in run))


def bytes_in_flight(kernel: str) -> int:
    """Bytes of codes that a multiprocessor's warps load ahead: 16 of each row, in a thread."""
    (found,) = (one for one in nvcc.compiled(nvcc.ROOT / MMA) if is_hopper(one, kernel))
    tall = int(kernel.split(", ")[2])
    blocks = model.resident(found.resources.registers, found.resources.shared, MMA_WARPS)
    return blocks * MMA_WARPS * model.LANES * 2 * tall * 16


def is_hopper(one: Compiled, kernel: str) -> bool:
    return one.kernel == kernel and one.arch == "sm_90a"


def longest(source: str, constants: Mapping[str, str], kernel: str) -> int:
    """Instructions that a thread executes in one iteration of the kernel's longest loop."""
    code = parsed(machine_code(source, tuple(constants.items()))[kernel])
    return max(len(list(executed(loop))) for loop in loops(code))


@cache
def machine_code(source: str, constants: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Kernel -> its sm_90 code, from a copy of the source with these constants."""
    path = BUILD / "probes" / source.rpartition("csrc/cuda/")[2].replace("/", "_")
    sass.write(path, with_constants((nvcc.ROOT / source).read_text(), constants).encode())
    text = sass.disassembled(nvcc.device_code(path, ["sm_90a"]))
    found = dict(sass.CODE.findall(text))
    return dict(zip(nvcc.demangled(found), found.values(), strict=True))


def with_constants(text: str, constants: tuple[tuple[str, str], ...]) -> str:
    for pattern, value in constants:
        text, count = re.subn(pattern, value, text, flags=re.S)
        if not count:
            raise ValueError(f"no {pattern} in the source: the probe measures something else")
    return text
