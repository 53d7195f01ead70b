"""Triton dequantize_weight: writes a quantized weight as a floating-point matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.quantized_linear.call import OPTIONS, Weight, has_kernel
from fusedops.triton.quantized_linear.codes import (
    load_codes,
    load_scales,
    low_halves,
    stored,
    weight,
)
from fusedops.triton.tile import composite, launched, outputs_of

ROWS, COLUMNS = 32, 128


def dequantize_weight(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """fusedops::dequantize_weight; see csrc/ops/quantized_linear."""
    operator = torch.ops.fusedops.dequantize_weight.default
    layout = format, out_features, in_features, group_size
    if not has_kernel(dtype):
        return composite(operator, qweight, scales, zeros, *layout, dtype)
    outputs_of(operator, qweight, scales, zeros, *layout, dtype)  # checks the arguments
    with torch.accelerator.device_index(qweight.device.index):
        return dequantize(Weight.of(qweight, scales, zeros, *layout), dtype)


def dequantize(w: Weight, dtype: torch.dtype, scaled: bool = True) -> Tensor:
    """The weight, [n, k]; without per-row scales unless `scaled`."""
    out = w.scales.new_empty((w.n, w.k), dtype=dtype)
    if out.numel():
        scale, columns = w.columns(COLUMNS)
        dequantize_kernel[(-(-w.n // ROWS), -(-w.k // columns))](
            out,
            SCALE="tile" if scale == "row" and scaled else scale,
            N=ROWS,
            K=columns,
            num_warps=4,
            **w.arguments(),
            **OPTIONS,
        )
    return out


@launched
@triton.jit
def dequantize_kernel(
    out,
    codes,
    scales,
    zeros,
    table,
    n,
    k,
    row_bytes,
    groups,
    group_size,
    FORMAT: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    row = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)[:, None]
    start = tl.program_id(1) * K
    w = codes, scales, zeros, table, n, k, row_bytes, groups, group_size
    q = load_codes(w, row, start, FORM, K)
    scale, zero = None, None
    if SCALE != "row":
        scale, zero = load_scales(w, row, start, FORMAT, FORM, SCALE, K)
    if FORM == "halves":
        high = weight(q >> 4, scale, zero, table, FORMAT, SCALE)
        numbers = tl.interleave(high, weight(q & 15, scale, zero, table, FORMAT, SCALE))
    else:
        if FORM == "flat":
            q = tl.where(low_halves(w, row, start, K), q & 15, q >> 4)
        numbers = weight(q, scale, zero, table, FORMAT, SCALE)
    col = start + tl.arange(0, K)[None, :]
    tl.store(out + row * k + col, stored(numbers, out), (row < n) & (col < k))
