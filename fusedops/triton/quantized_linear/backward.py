"""Triton quantized_linear's backward: gradients of x and bias, from the weight's codes.

A program computes M rows by K columns of dx. It loops over the weight's rows, N at a time. If a
weight row has one scale, dz is multiplied by it. With two codes per byte, the even and the odd
columns have separate sums, which are interleaved once, before the store. If there are too few
programs to fill a GPU, several programs share the weight's rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.quantized_linear.call import (
    FEW_GRADIENT,
    GRADIENT,
    INTERPRETED,
    INTERPRETING,
    OPTIONS,
    Weight,
    as_rows,
    few,
    gpu_kernel,
    has_kernel,
    operand_of,
    padded,
    parts_of,
    registers,
)
from fusedops.triton.quantized_linear.codes import (
    load_codes,
    load_scales,
    low_halves,
    operand,
    product,
    stored,
    weight,
)
from fusedops.triton.quantized_linear.dequantize import dequantize
from fusedops.triton.quantized_linear.finish import join
from fusedops.triton.quantized_linear.forward import wide_product
from fusedops.triton.tile import composite, launched, outputs_of

ATEN = torch.ops.aten
SLOPES = {
    "none": lambda dy, z: dy,
    "relu": lambda dy, z: ATEN.threshold_backward(dy, z, 0),
    "gelu": lambda dy, z: ATEN.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: ATEN.gelu_backward(dy, z, approximate="tanh"),
    "silu": lambda dy, z: ATEN.silu_backward(dy, z),
}


def quantized_linear_backward(
    dy: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    z: Tensor | None,
    format: str,
    out_features: int,
    in_features: int,
    group_size: int,
    activation: str,
    compute: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """fusedops::quantized_linear_backward; see csrc/ops/quantized_linear. (dx, dbias)"""
    operator = torch.ops.fusedops.quantized_linear_backward.default
    layout = format, out_features, in_features, group_size
    arguments = dy, qweight, scales, zeros, z, *layout, activation, compute, output_mask
    if not has_kernel(dy.dtype) or dy.numel() == 0:
        return composite(operator, *arguments)
    dx, dbias = outputs_of(operator, *arguments)
    with torch.accelerator.device_index(dy.device.index):
        dz = as_rows(SLOPES[activation](dy, z))
        if dbias is not None:
            torch.sum(dz, 0, out=dbias)
        if dx is not None and dx.numel():
            run(dz, Weight.of(qweight, scales, zeros, *layout), dx, compute)
    return dx, dbias


def run(dz: Tensor, w: Weight, dx: Tensor, compute: str) -> None:
    """dz: [rows, n]."""
    asked = "any" if compute == "int8" else compute
    rows, made_of = dz.shape[0], operand_of(asked)
    if gpu_kernel(rows, "none", asked) == "scratch":
        multiply_scratch(dz, w, dx.view(rows, w.k))
        return
    tile = tile_of(w, rows, made_of)
    programs = -(-rows // tile["M"]) * -(-w.k // tile["K"])
    tiles = -(-w.n // tile["N"])
    parts = parts_of(programs, tiles, dz.device)
    sums = dx if parts == 1 else dx.new_empty((parts, rows, w.k), dtype=torch.float32)
    gradient_kernel[(programs, parts)](
        dz,
        factors=w.factors,
        dx=sums,
        rows=rows,
        dz_row=dz.stride(0),
        per_part=-(-tiles // parts),
        OPERAND=made_of,
        **w.arguments(),
        **tile,
    )
    if parts > 1:
        join(sums, dx.view(rows, w.k))


def tile_of(w: Weight, rows: int, made_of: str) -> dict[str, Any]:
    m, n, k, warps, stages = (FEW_GRADIENT if few(rows) else GRADIENT)[made_of]
    if INTERPRETING:
        m, n, warps, stages = INTERPRETED
        k = n
    scale, k = w.columns(k)
    return OPTIONS | {
        "SCALE": scale,
        "M": min(padded(rows), m),
        "N": n,
        "K": k,
        "num_warps": warps,
        "num_stages": w.stages(stages),
        "maxnreg": registers(rows),
    }


def multiply_scratch(dz: Tensor, w: Weight, dx: Tensor) -> None:
    numbers = dequantize(w, torch.bfloat16, scaled=False)
    if w.a_scale_a_row:
        dz = (dz * w.scales.t()).to(torch.bfloat16)
    if dx.dtype == torch.bfloat16:
        torch.mm(dz, numbers, out=dx)
    else:
        join(wide_product(dz, numbers)[None], dx)


@launched
@triton.jit(do_not_specialize=["rows", "per_part"])
def gradient_kernel(
    dz,
    codes,
    scales,
    zeros,
    table,
    factors,
    dx,
    rows,
    n,
    k,
    dz_row,
    row_bytes,
    groups,
    group_size,
    per_part,
    FORMAT: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    OPERAND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Part program_id(1) of the weight's rows: per_part tiles of N.

    Stores its sums in float32 if there are several parts.
    """
    k_blocks = tl.cdiv(k, K)
    i = (tl.program_id(0) // k_blocks * M + tl.arange(0, M)).to(tl.int64)[:, None]
    start = tl.program_id(0) % k_blocks * K
    w = codes, scales, zeros, table, n, k, row_bytes, groups, group_size
    HALVES: tl.constexpr = FORM == "halves"
    WIDTH: tl.constexpr = K // 2 if HALVES else K
    sums = tl.zeros([M, WIDTH], tl.float32)
    odd = tl.zeros([M, WIDTH], tl.float32)
    begin = tl.program_id(1) * per_part
    for t in range(begin, tl.minimum(begin + per_part, tl.cdiv(n, N))):
        j = t * N + tl.arange(0, N)
        g = tl.load(dz + i * dz_row + j[None, :], (i < rows) & (j < n)[None, :], 0)
        if factors is not None:
            g = g.to(tl.float32) * tl.load(factors + j, j < n, 0)[None, :]
        g = operand(g, OPERAND)
        row = j.to(tl.int64)[:, None]
        q = load_codes(w, row, start, FORM, K)
        scale, zero = None, None
        if SCALE != "row":
            scale, zero = load_scales(w, row, start, FORMAT, FORM, SCALE, K)
        if HALVES:
            high = weight(q >> 4, scale, zero, table, FORMAT, SCALE)
            low = weight(q & 15, scale, zero, table, FORMAT, SCALE)
            sums = product(g, operand(high, OPERAND), sums)
            odd = product(g, operand(low, OPERAND), odd)
        else:
            if FORM == "flat":
                q = tl.where(low_halves(w, row, start, K), q & 15, q >> 4)
            numbers = weight(q, scale, zero, table, FORMAT, SCALE)
            sums = product(g, operand(numbers, OPERAND), sums)
    if HALVES:
        sums = tl.interleave(sums, odd)
    col = start + tl.arange(0, K)[None, :]
    at = (tl.program_id(1) * rows.to(tl.int64) + i) * k + col
    tl.store(dx + at, stored(sums, dx), (i < rows) & (col < k))
