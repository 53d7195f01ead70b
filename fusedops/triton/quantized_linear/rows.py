"""Triton quantized_linear: prepares rows of x as bfloat16 or 8-bit codes.

Rows start at whole vectors. A row's codes are scaled so that its largest element has the largest
code. One program handles a row of codes. It reads the row twice, the second time mostly from a
cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.tile import launched

COLUMNS = 4096  # per row, at a time
VECTOR = 16  # codes per load, or elements of two


def narrow_rows(x: Tensor) -> Tensor:
    """Rounds x [rows, k] to bfloat16 once.

    Otherwise every tile that shares these rows would round them again, and need registers for it.
    """
    return empty_rows(x, torch.bfloat16).copy_(x)


def empty_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory in x's shape [rows, k]."""
    rows, k = x.shape
    return x.new_empty((rows, -(-k // VECTOR) * VECTOR), dtype=dtype)[:, :k]


def laid_out(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [rows, k] as numbers of this dtype, in rows that start at whole vectors."""
    if codes.dtype == dtype and codes.stride(0) % VECTOR == 0 and codes.data_ptr() % VECTOR == 0:
        return codes
    return empty_rows(codes, dtype).copy_(codes)


def quantized_rows(x: Tensor, format: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [rows, k], in rows that start at whole vectors, and steps [rows] float32.

    A row that is not finite has a NaN step. dtype: the codes' dtype. fp8 codes are also bfloat16
    numbers, which every GPU supports.
    """
    rows, k = x.shape
    codes = empty_rows(x, dtype)
    steps = x.new_empty(rows, dtype=torch.float32)
    columns = min(triton.next_power_of_2(max(k, 1)), COLUMNS)
    rows_kernel[(rows,)](
        x,
        codes,
        steps,
        k,
        x.stride(0),
        codes.stride(0),
        INTEGERS=format == "int8",
        COLUMNS=columns,
        num_warps=max(1, min(columns // 512, 8)),
        enable_fp_fusion=False,  # rounding the product by itself gives the reference's codes
    )
    return codes, steps


@launched
@triton.jit
def rows_kernel(x, codes, steps, k, x_row, code_row, INTEGERS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    codes += row * code_row
    max_value = tl.zeros([COLUMNS], tl.float32)
    astray = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, k, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        v = tl.abs(tl.load(x + col, col < k, 0).to(tl.float32))
        astray = tl.where(v < float("inf"), astray, 1.0)  # a maximum ignores NaN
        max_value = tl.maximum(max_value, tl.where(v < float("inf"), v, 0.0))
    step = tl.max(max_value, 0) * (0.007874015748031496 if INTEGERS else 0.002232142857142857)
    inverse = tl.div_rn(1.0, tl.where(step < 1e-38, 1.0, step))  # tiny elements get code 0
    for start in range(0, k, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        v = tl.load(x + col, col < k, 0).to(tl.float32) * inverse
        v = tl.where(tl.abs(v) < 500, v, 0.0)  # for a row that is not finite
        # Adding and subtracting 1.5 2^23 rounds v to integers, half to even. With 1.5 2^20 times
        # v's power of two it rounds to e4m3: 3 bits after the first, or steps of 2^-9 below 2^-6.
        large = tl.full([COLUMNS], 12582912.0, tl.float32)
        if not INTEGERS:
            exponent = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
            large = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
        nearest = (v + large) - large
        if INTEGERS:
            nearest = tl.minimum(tl.maximum(nearest, -127.0), 127.0)
        tl.store(codes + col, nearest.to(codes.dtype.element_ty), col < k)
    tl.store(steps + row, tl.where(tl.max(astray, 0) > 0, float("nan"), step))
