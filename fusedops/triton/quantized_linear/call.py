"""Triton quantized_linear's launch settings: weight tensors, operand dtypes, tile sizes."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fusedops.extension import _C
from fusedops.references.quantized_linear import FORMATS, NF4_BLOCK, Format
from fusedops.triton.tile import architecture, check_before_capture, multiprocessors

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
LEAST_COLUMNS = 32  # in a tile with one scale per row: half of fewer is not a valid operand
LEAST_TILES = 4  # per part
MOST_PARTS = 32
# By operand dtype: bfloat16, 8-bit integers, float8_e4m3fn, or float32. Rows of the weight N,
# columns K, warps, and pipeline stages. M rows of x: all, or ROWS. sm_90's fast dots need 64 rows
# of the first operand. The weight is the first operand, so that it may stay in the registers where
# it was dequantized. No GPU was available to time any of this.
FEW = {"narrow": (64, 64, 4, 4), "wide": (32, 32, 4, 1)}
FEW |= dict.fromkeys(("integer", "e4m3"), (64, 128, 4, 4))
MANY = {"narrow": (128, 64, 8, 3), "wide": (32, 32, 4, 1)}
MANY |= dict.fromkeys(("integer", "e4m3"), (128, 128, 8, 3))
ROWS = {"narrow": 128, "integer": 128, "e4m3": 128, "wide": 16}
# Backward: at most M rows of dz; N rows of the weight, which are summed; K columns.
GRADIENT = {"narrow": (128, 64, 64, 8, 3), "wide": (16, 32, 32, 4, 1)}
FEW_GRADIENT = {"narrow": (64, 64, 64, 4, 3), "wide": (16, 32, 32, 4, 1)}
# The formats' names in kernels. A string that names a type, such as "int8", would be converted to
# that type on the way to the kernel, and then equal no string.
NAMES = {"int8": "signed", "int4": "offset", "nf4": "table", "fp8": "e4m3"}
INTERPRETED = (64, 128, 4, 1)  # a tile's cost there is independent of its size
OPTIONS = {"enable_fp_fusion": True}  # Triton's default; 3.9 warns about it


@dataclass(frozen=True)
class Weight:
    """A weight's tensors, contiguous, and how to read them."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: str
    n: int
    k: int
    group_size: int

    @classmethod
    def of(
        cls,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        format: str,
        n: int,
        k: int,
        group_size: int,
    ) -> "Weight":
        codes = qweight.contiguous()
        if codes.dtype == torch.float8_e4m3fn:  # no GPU before sm_89 has it
            codes = codes.view(torch.uint8)
        zeros = None if zeros is None else zeros.contiguous()
        return cls(codes, scales.contiguous(), zeros, format, n, k, group_size)

    @property
    def properties(self) -> Format:
        return FORMATS[self.format]

    @property
    def a_scale_a_row(self) -> bool:
        """Whether each row has one scale, applied to the sums (or to the gradient)."""
        return self.properties.bits == 8 and self.scales.shape[1] == 1

    @property
    def factors(self) -> Tensor | None:
        return self.scales if self.a_scale_a_row else None

    @property
    def form(self) -> str:
        if self.properties.bits == 8:
            return "whole"
        return "flat" if self.properties.flat and self.k % 2 else "halves"

    def columns(self, limit: int) -> tuple[str, int]:
        """SCALE, and the number of columns per tile, at most the given one."""
        if self.a_scale_a_row:
            return "row", limit
        group = self.group_size
        if self.properties.flat:
            group = NF4_BLOCK if self.k % NF4_BLOCK == 0 else 1
        elif self.scales.shape[1] <= 1:
            group = limit
        within = min(group & -group, limit)
        if within >= LEAST_COLUMNS:
            return "tile", within
        return "each", limit if INTERPRETING else LEAST_COLUMNS  # as many scales as numbers

    def stages(self, limit: int) -> int:
        """Pipeline stages. nf4's table loads would be pipelined too, one per element."""
        return 1 if self.format == "nf4" else limit

    def arguments(self) -> dict[str, Any]:
        """The arguments that all kernels take."""
        return {
            "codes": self.codes,
            "scales": self.scales,
            "zeros": self.zeros,
            "table": nf4_table(self.codes.device) if self.format == "nf4" else None,
            "n": self.n,
            "k": self.k,
            "row_bytes": (self.k + 1) // 2,
            "groups": self.scales.shape[-1],
            "group_size": self.group_size,
            "FORMAT": NAMES[self.format],
            "FORM": self.form,
        }


def operand_of(compute: str) -> str:
    """The operand dtype of a floating-point matmul.

    None means "bf16", the lowest allowed and the fastest. "int8" comes here if group scales
    separate its integers.
    """
    return "wide" if compute in ("exact", "int8") else "narrow"


def multiplies_integers(w: Weight) -> bool:
    """Whether codes by codes is an integer matmul, which is exact: any `compute` allows it."""
    return w.properties.dtype == torch.int8 and w.a_scale_a_row and w.k <= _C.most_integers


def multiplies_e4m3(w: Weight, compute: str) -> bool:
    """Whether codes by codes is a float8_e4m3fn matmul, whose sums are not quite float32's."""
    if w.properties.dtype != torch.float8_e4m3fn or compute == "exact":
        return False
    return INTERPRETING or architecture(w.codes.device) >= 89


def has_kernel(dtype: torch.dtype) -> bool:
    return dtype != torch.float64


def gpu_kernel(rows: int, input_format: str, compute: str) -> str:
    """The kernel for this many rows, as csrc/ops/quantized_linear/gpu_kernel.cpp says."""
    return _C.quantized_linear_gpu_kernel(rows, input_format, compute)


def few(rows: int) -> bool:
    """Whether the depth is split, with tiles for few rows."""
    return gpu_kernel(rows, "none", "exact") != "tiles"


def parts_of(programs: int, tiles: int, device: torch.device) -> int:
    """The number of programs that split a tile's depth, so that they fill the GPU.

    It does not depend on the values, so results are bitwise reproducible.
    """
    fill = 2 * multiprocessors(device) // max(programs, 1)
    return max(1, min(fill, tiles // LEAST_TILES, MOST_PARTS))


@functools.cache
def nf4_table(device: torch.device) -> Tensor:
    """Created once, in its own thread.

    While torch.compile warms up a CUDA graph, this thread's allocations belong to the graph, which
    would overwrite the table. During a capture no thread may allocate. The copy has ended when
    torch.tensor returns, so any stream may read the table.
    """
    check_before_capture(f"the table of nf4's values is not on {device} yet")
    make = functools.partial(torch.tensor, _C.nf4_table(), dtype=torch.float32, device=device)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def as_rows(t: Tensor) -> Tensor:
    """[rows, n] with contiguous rows."""
    rows = t.reshape(-1, t.shape[-1]) if t.shape[-1] else t.new_empty(t.shape[:-1].numel(), 0)
    return rows if rows.shape[1] <= 1 or rows.stride(1) == 1 else rows.contiguous()


def registers(rows: int) -> int | None:
    """Registers per thread: all for large tiles, where ptxas would spill to stay at 128."""
    return None if few(rows) else 255


def padded(rows: int) -> int:
    """Rounded up to a power of two of at least 16, as tl.dot requires."""
    return max(triton.next_power_of_2(rows), 16)
