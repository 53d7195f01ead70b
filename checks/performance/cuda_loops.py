"""Compiles CUDA kernels with one format's options as constants, and counts their main loop.

The kernels decide at run time which formats they read. A copy of the source, in which the tests for
the format are constants, has only that format's path; it decides nothing, so its count lacks a few
comparisons per block.
"""

import re
from collections.abc import Mapping
from functools import cache

from checks.machine_code import BUILD, nvcc, sass
from checks.performance.sass_loops import executed, loops, parsed

ADAMW = "csrc/cuda/adamw/step.cu"
GEMV = "csrc/cuda/quantized_linear/gemv.cu"

# Patterns in the source -> what a block of 256 elements of a large bfloat16 parameter with 8-bit
# moments makes of them. A tensor's factors, which its first block computes, are only loaded.
BF16_INT8 = {
    r"\bt\.dtype\b": "Dtype::bfloat16",
    r"\bt\.moments\b": "Moments::int8",
    r"\bt\.rounding\b": "Rounding::stochastic",
    r"\bt\.max_exp_avg_sq != nullptr": "false",
    r"step_block<kParam, kMoments, false>\(.*?\);": "return;",
    r"= step_of\(.*?\);": "= *reinterpret_cast<const Step*>(a.squares);",
}
BF16_INPUT = {r"\ba\.x_dtype\b": "Dtype::bfloat16"}


def adamw_instructions() -> float:
    """Instructions per element and thread of a step in bfloat16 with 8-bit moments."""
    return longest(ADAMW, BF16_INT8, "adamw_step") / 8  # a lane has 8 elements


def int4_instructions() -> float:
    """Instructions per byte of int4 weights and thread, for one row of bfloat16."""
    return longest(GEMV, BF16_INPUT, "gemv<int4, true, 1>") / 64  # 16 bytes of each of 4 rows


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
