"""Triton quantized_linear: sums split matmuls, and applies row scales, bias and activation."""

import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.quantized_linear.codes import INTERPRETING, stored
from fusedops.triton.tile import launched

TILE = 1 << 16 if INTERPRETING else 1024  # elements per program that joins parts


@triton.jit
def finish(
    v,
    row,
    col,
    rows,
    n,
    steps,
    factors,
    bias,
    z,
    y,
    ACTIVATION: tl.constexpr,
):
    """Writes y, and z if it is needed, from sums v at [row, col]; row is int64.

    steps: the scales of x's rows, if these were rounded to codes. factors: the weight's row scales.
    """
    v = v.to(tl.float32)
    if steps is not None:
        v *= tl.load(steps + row, row < rows, 0)
    if factors is not None:
        v *= tl.load(factors + col, col < n, 0)
    if bias is not None:
        v += tl.load(bias + col, col < n, 0).to(tl.float32)
    rounded = stored(v, y)
    at, live = row * n + col, (row < rows) & (col < n)
    if z is not None:
        tl.store(z + at, rounded, live)
    if ACTIVATION != "none":
        rounded = stored(activated(rounded.to(tl.float32), ACTIVATION), y)
    tl.store(y + at, rounded, live)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(z < 0, 0.0, z)  # a NaN stays
    elif ACTIVATION == "gelu":
        return z * (0.5 * (1 + tl.erf(z * 0.7071067811865476)))
    elif ACTIVATION == "gelu_tanh":
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    else:
        return z * tl.sigmoid(z)


@launched
@triton.jit(do_not_specialize=["parts", "rows"])
def join_kernel(
    sums,
    steps,
    factors,
    bias,
    z,
    y,
    parts,
    rows,
    n,
    ACTIVATION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Adds the parts of M rows by N columns in order, and finishes them."""
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)[:, None]
    col = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    v = tl.zeros([M, N], sums.dtype.element_ty)
    for part in range(0, parts):
        at = (part * rows.to(tl.int64) + row) * n + col
        v += tl.load(sums + at, (row < rows) & (col < n), 0)
    finish(v, row, col, rows, n, steps, factors, bias, z, y, ACTIVATION)


def join(
    sums: Tensor,
    y: Tensor,
    steps: Tensor | None = None,
    factors: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    activation: str = "none",
) -> None:
    """y, and z if given, from sums [parts, rows, n]."""
    parts, rows, n = sums.shape
    columns = min(triton.next_power_of_2(n), TILE)
    at_once = TILE // columns
    join_kernel[(-(-rows // at_once), -(-n // columns))](
        sums,
        steps,
        factors,
        bias,
        z,
        y,
        parts,
        rows,
        n,
        ACTIVATION=activation,
        M=at_once,
        N=columns,
        num_warps=8,
        enable_fp_fusion=True,
    )
