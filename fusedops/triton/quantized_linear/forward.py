"""Triton quantized_linear's forward: y from x and the weight's codes.

A program computes N columns of y for M rows of x, and loops over K. The columns of y are the
weight's rows. The weight is the first operand of the dot, so that its values stay in the registers
where they were dequantized; sums are [N, M]. With two codes per byte, the even columns multiply x's
even columns and the odd ones x's odd columns: two dots of half the depth. If few rows give too few
programs to fill a GPU, several programs share the depth (`parts_of`), and `join` adds their sums in
order.

Global traffic: the codes once per M rows, and x once per N columns, mostly from the L2 cache,
because the programs of GROUP row blocks run together.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.quantized_linear.call import (
    FEW,
    INTERPRETED,
    INTERPRETING,
    MANY,
    OPTIONS,
    ROWS,
    Weight,
    as_rows,
    few,
    gpu_kernel,
    has_kernel,
    multiplies_e4m3,
    multiplies_integers,
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
    weight,
)
from fusedops.triton.quantized_linear.dequantize import dequantize
from fusedops.triton.quantized_linear.finish import finish, join
from fusedops.triton.quantized_linear.rows import (
    VECTOR,
    laid_out,
    narrow_rows,
    quantized_rows,
)
from fusedops.triton.tile import composite, launched, outputs_of

# e4m3 products that a GPU adds before rounding the sum to float32: sm_90's cores lose digits.
PROMOTED = tl.constexpr(128)
GROUP = 8  # row blocks that share the weight while it is in the L2 cache
ATEN = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def quantized_linear_forward(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    format: str,
    out_features: int,
    in_features: int,
    group_size: int,
    activation: str,
    input_format: str,
    compute: str,
    keep_z: bool,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fusedops::quantized_linear_forward; see csrc/ops/quantized_linear. (y, z)"""
    operator = torch.ops.fusedops.quantized_linear_forward.default
    layout = format, out_features, in_features, group_size
    options = activation, input_format, compute, keep_z, x_scale, out_dtype
    arguments = x, qweight, scales, zeros, bias, *layout, *options
    if not has_kernel(out_dtype or x.dtype):
        return composite(operator, *arguments)
    y, z = outputs_of(operator, *arguments)
    if y.numel():
        w = Weight.of(qweight, scales, zeros, *layout)
        bias = None if bias is None else bias.contiguous()
        steps = None if x_scale is None else x_scale.reshape(-1)
        with torch.accelerator.device_index(x.device.index):
            run(as_rows(x), steps, w, bias, y, z, activation, input_format, compute)
    return y, z


# csrc/cuda's operator calls this if there are more rows than its own kernel handles.
quantized_linear_tiles = quantized_linear_forward


def run(
    x: Tensor,
    steps: Tensor | None,
    w: Weight,
    bias: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    activation: str,
    input_format: str,
    compute: str,
) -> None:
    """x: [rows, k]. steps: [rows], if x is codes."""
    if gpu_kernel(x.shape[0], input_format, compute) == "scratch":
        multiply_scratch(x, w, bias, y, z, activation)
        return
    made_of = operand_of(compute)
    if input_format != "none":
        dtype = torch.int8 if input_format == "int8" else torch.bfloat16
        if input_format == "int8" and multiplies_integers(w):
            made_of = "integer"
        elif input_format == "fp8" and multiplies_e4m3(w, compute):
            made_of, dtype = "e4m3", torch.float8_e4m3fn
        if steps is None:
            x, steps = quantized_rows(x, input_format, dtype)
        else:
            x = laid_out(x, dtype)
        x = x.view(torch.uint8) if made_of == "e4m3" else x  # bytes, like the weight's
    elif made_of == "narrow" and not lies_well(x):
        x = narrow_rows(x)
    multiply(x, steps, w, bias, y, z, activation, made_of)


def lies_well(x: Tensor) -> bool:
    """Whether tiles can read x's rows as vectors and, for many rows, as operands directly."""
    return x.stride(0) % VECTOR == 0 and (x.dtype == torch.bfloat16 or few(x.shape[0]))


def multiply(
    x: Tensor,
    steps: Tensor | None,
    w: Weight,
    bias: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    activation: str,
    made_of: str,
) -> None:
    rows = x.shape[0]
    tile = tile_of(w, rows, made_of)
    programs = -(-w.n // tile["N"]) * -(-rows // tile["M"])
    tiles = -(-w.k // tile["K"])
    parts = parts_of(programs, tiles, x.device)
    per_part = -(-tiles // parts)
    sums = y
    if parts > 1:
        dtype = torch.int32 if made_of == "integer" else torch.float32
        sums = x.new_empty((parts, rows, w.n), dtype=dtype)
    alone = parts == 1
    product_kernel[(programs, parts)](
        x,
        steps if alone else None,
        factors=w.factors if alone else None,
        bias=bias if alone else None,
        z=z if alone else None,
        y=sums,
        rows=rows,
        x_row=x.stride(0),
        per_part=per_part,
        OPERAND=made_of,
        ACTIVATION=activation if alone else "none",
        SPLIT=parts > 1,
        GROUP=GROUP,
        **w.arguments(),
        **tile,
    )
    if parts > 1:
        join(sums, y.view(rows, w.n), steps, w.factors, bias, z, activation)


def tile_of(w: Weight, rows: int, made_of: str) -> dict[str, Any]:
    n, k, warps, stages = INTERPRETED if INTERPRETING else (FEW if few(rows) else MANY)[made_of]
    scale, k = w.columns(k)
    m = min(padded(rows), INTERPRETED[0] if INTERPRETING else ROWS[made_of])
    return OPTIONS | {
        "SCALE": scale,
        "M": m,
        "N": n,
        "K": k,
        "num_warps": warps,
        "num_stages": w.stages(stages),
        "maxnreg": registers(rows),
    }


def multiply_scratch(
    x: Tensor, w: Weight, bias: Tensor | None, y: Tensor, z: Tensor | None, activation: str
) -> None:
    """torch's matmul with a temporary bfloat16 copy of the weight.

    Per-row scales are applied to the sums, which then are float32.
    """
    numbers = dequantize(w, torch.bfloat16, scaled=False)
    if x.dtype == torch.bfloat16 and not w.a_scale_a_row:
        before = F.linear(x, numbers, bias)
        if z is not None:
            z.view(before.shape).copy_(before)
        y.view(before.shape).copy_(ATEN[activation](before))
        return
    sums = wide_product(x, numbers.t())
    join(sums[None], y.view(sums.shape), None, w.factors, bias, z, activation)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b for bfloat16 inputs, in float32."""
    a = a.to(torch.bfloat16)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


@launched
@triton.jit(do_not_specialize=["rows", "per_part"])
def product_kernel(
    x,
    steps,
    codes,
    scales,
    zeros,
    table,
    factors,
    bias,
    z,
    y,
    rows,
    n,
    k,
    x_row,
    row_bytes,
    groups,
    group_size,
    per_part,
    FORMAT: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    OPERAND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Part program_id(1) of the depth: per_part tiles of K."""
    m_block, n_block = block_of(tl.program_id(0), rows, n, GROUP, M, N)
    i = (m_block * M + tl.arange(0, M)).to(tl.int64)
    row = (n_block * N + tl.arange(0, N)).to(tl.int64)[:, None]
    w = codes, scales, zeros, table, n, k, row_bytes, groups, group_size
    INTEGERS: tl.constexpr = OPERAND == "integer"
    sums = tl.zeros([N, M], tl.int32 if INTEGERS else tl.float32)
    begin = tl.program_id(1) * per_part
    for t in range(begin, tl.minimum(begin + per_part, tl.cdiv(k, K))):
        start = t * K
        col = start + tl.arange(0, K)
        a = tl.load(
            x + i[:, None] * x_row + col[None, :], (i < rows)[:, None] & (col < k)[None, :], 0
        )
        q = load_codes(w, row, start, FORM, K)
        if INTEGERS:
            sums = product(q, tl.trans(a), sums)
        elif OPERAND == "e4m3":
            a, q = a.to(tl.float8e4nv, bitcast=True), q.to(tl.float8e4nv, bitcast=True)
            sums = tl.dot(q, tl.trans(a), sums, max_num_imprecise_acc=PROMOTED)
        else:
            sums = add_tile(sums, a, q, w, row, start, FORMAT, FORM, SCALE, OPERAND, K)

    i, col = i[None, :], row
    if SPLIT:
        part = tl.program_id(1).to(tl.int64)
        tl.store(y + (part * rows + i) * n + col, sums, (i < rows) & (col < n))
    else:
        finish(sums, i, col, rows, n, steps, factors, bias, z, y, ACTIVATION)


@triton.jit
def block_of(pid, rows, n, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """A program's row and column blocks: GROUP row blocks run together."""
    m_blocks, n_blocks = tl.cdiv(rows, M), tl.cdiv(n, N)
    first = pid // (GROUP * n_blocks) * GROUP
    together = tl.minimum(m_blocks - first, GROUP)
    within = pid % (GROUP * n_blocks)
    return first + within % together, within // together


@triton.jit
def add_tile(
    sums,
    a,
    q,
    w,
    row,
    start,
    FORMAT: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    OPERAND: tl.constexpr,
    K: tl.constexpr,
):
    """Adds a tile's codes times a [M, K] to sums [N, M]."""
    scale, zero = None, None
    if SCALE != "row":
        scale, zero = load_scales(w, row, start, FORMAT, FORM, SCALE, K)
    if FORM == "halves":
        even, odd = tl.split(tl.reshape(a, (a.shape[0], K // 2, 2)))
        high = weight(q >> 4, scale, zero, w[3], FORMAT, SCALE)
        low = weight(q & 15, scale, zero, w[3], FORMAT, SCALE)
        sums = product(operand(high, OPERAND), tl.trans(operand(even, OPERAND)), sums)
        return product(operand(low, OPERAND), tl.trans(operand(odd, OPERAND)), sums)
    else:
        if FORM == "flat":
            q = tl.where(low_halves(w, row, start, K), q & 15, q >> 4)
        numbers = weight(q, scale, zero, w[3], FORMAT, SCALE)
        return product(operand(numbers, OPERAND), tl.trans(operand(a, OPERAND)), sums)
