"""Launches for checking the Triton quantized_linear kernels' compiled code.

The kernels must not spill. Matmuls in 16 bits, or of codes by codes, must use the architecture's
own tensor cores if the tile is tall enough for them. float32 uses no tensor cores, because its
products must be float32.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
from packaging.version import Version

from checks.machine_code.gates import Demand
from checks.machine_code.launches import Launch
from fusedops.triton.quantized_linear import (
    dequantize_weight,
    quantized_linear_backward,
    quantized_linear_forward,
)

BF16, FP32 = torch.bfloat16, torch.float32
N = K = 8192
FEW = 64  # columns for which the depth is split
# Format: group_size, and the shapes of its tensors.
FORMATS = {"int8": K, "int8 in groups": 128, "int4": 64, "nf4": 64, "fp8": K}
ROWS = (16, 64, 512)  # rows for split depth, the most rows for split depth, rows for tiles
# Name: dtype, input_format, compute.
NUMERICS = {
    "bf16": (BF16, "none", "any"),
    "int8 inputs": (BF16, "int8", "any"),
    "fp32, exact": (FP32, "none", "exact"),
    "fp32": (FP32, "none", "any"),
    "fp16": (torch.float16, "none", "any"),
    "fp8 inputs": (BF16, "fp8", "any"),
}


def calls(quick: bool) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(variant, case, call): each format with each kernel; a selection if quick."""
    for kind in ("int8", "int4") if quick else FORMATS:
        for numerics in list(NUMERICS)[: 1 if quick else None]:
            for rows in ROWS[::2] if quick else ROWS:
                variant, case = f"quantized linear, {kind}, {numerics}", f"{rows} rows"
                yield variant, case, partial(forward, kind, rows, numerics)
                if not numerics.endswith("inputs"):
                    yield variant, case, partial(backward, kind, rows, numerics)
        yield f"quantized linear, {kind}", "bf16", partial(dequantize, kind)
    for kind in ("nf4",) if quick else ("nf4", "int8", "fp8"):
        for rows in ROWS[:1] if quick else ROWS:
            odd = partial(forward, kind, rows, "bf16", K + 1)
            yield f"quantized linear, {kind}, odd rows, bf16", f"{rows} rows", odd
    for numerics in list(NUMERICS)[: 2 if quick else 3]:
        split = partial(forward, "int8", 16, numerics, K, FEW)
        yield f"quantized linear, int8, {numerics}, parts", "16 rows", split
    back = partial(backward, "int4", 16, "bf16", FEW)
    yield "quantized linear, int4, bf16, parts", "16 rows", back


def forward(kind: str, rows: int, numerics: str, k: int = K, n: int = N) -> None:
    dtype, input_format, compute = NUMERICS[numerics]
    x, bias = torch.empty(rows, k, dtype=dtype), torch.empty(n, dtype=dtype)
    tensors, layout = weight(kind, k, n)
    quantized_linear_forward(x, *tensors, bias, *layout, "silu", input_format, compute, True)


def backward(kind: str, rows: int, numerics: str, k: int = K) -> None:
    dtype, _, compute = NUMERICS[numerics]
    dy = torch.empty(rows, N, dtype=dtype)
    tensors, layout = weight(kind, k, N)
    quantized_linear_backward(dy, *tensors, None, *layout, "none", compute, [True, False])


def dequantize(kind: str) -> None:
    tensors, layout = weight(kind, K, N)
    dequantize_weight(*tensors, *layout, BF16)


def weight(kind: str, k: int, n: int) -> tuple[tuple, tuple]:
    """qweight, scales, zeros; format, n, k, group_size."""
    format, size = kind.partition(" ")[0], FORMATS[kind]
    groups = -(-k // size)
    codes = {
        "int8": torch.empty(n, k, dtype=torch.int8),
        "int4": torch.empty(n, (k + 1) // 2, dtype=torch.uint8),
        "nf4": torch.empty((n * k + 1) // 2, 1, dtype=torch.uint8),
        "fp8": torch.empty(n, k, dtype=torch.float8_e4m3fn),
    }
    scales = torch.empty(-(-n * k // 64)) if format == "nf4" else torch.empty(n, groups)
    zeros = torch.empty(n, groups, dtype=torch.uint8) if format == "int4" else None
    return (codes[format], scales, zeros), (format, n, k, size)


def demand(launch: Launch) -> Demand:
    facts = launch.constants
    if facts.get("OPERAND", "wide") == "wide":
        return Demand()
    high = facts["N" if launch.kernel.__name__ == "product_kernel" else "M"]
    return Demand(dot=high >= 64 and (facts["OPERAND"] != "integer" or multiplies_integers()))


def multiplies_integers() -> bool:
    """Whether integers use this architecture's tensor cores: not on sm_100 before triton 3.7."""
    arch = triton.runtime.driver.active.get_current_target().arch
    return arch < 100 or Version(triton.__version__) >= Version("3.7")
