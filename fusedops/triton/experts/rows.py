"""Triton experts: each row's activation, its gradient, and the sum of a token's rows."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fusedops.triton.experts.routing import Routing
from fusedops.triton.quantized_linear.codes import INTERPRETING, stored
from fusedops.triton.tile import launched, tanh

__all__ = ["Gate", "gate", "gate_backward", "sum_slots"]

BLOCK = 4096 if INTERPRETING else 512


class Gate:
    """The gate's options as the kernels take them."""

    def __init__(
        self,
        activation: str,
        gated: bool,
        interleaved: bool,
        limit: float | None,
        alpha: float,
        up_offset: float,
    ) -> None:
        self.numbers = (0.0 if limit is None else limit, alpha, up_offset)
        self.constants: dict[str, Any] = {"ACTIVATION": activation, "GATED": gated}
        self.constants |= {"INTERLEAVED": interleaved, "LIMITED": limit is not None}


@triton.jit
def activated(g, alpha, ACTIVATION: tl.constexpr):
    """The activation of g, and its derivative, that of relu and relu2 without their mask."""
    if ACTIVATION == "none":
        value, slope = g, tl.full(g.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu":
        value = tl.where(g < 0, 0.0, g)  # a NaN stays
        slope = tl.full(g.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu2":
        r = tl.where(g < 0, 0.0, g)
        value, slope = r * r, r + r
    elif ACTIVATION == "gelu":
        s = 0.5 * (1 + tl.erf(g * 0.7071067811865476))
        value = g * s
        slope = s + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif ACTIVATION == "gelu_tanh":
        t = tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))
        value = g * (0.5 * (1 + t))
        inner = 0.7978845608028654 * (1 + 3 * 0.044715 * g * g)
        slope = 0.5 * (1 + t) + g * (0.5 * (1 - t) * (1 + t)) * inner
    else:
        s = tl.sigmoid(alpha * g)
        value = g * s
        slope = s + g * alpha * s * (1 - s)
    return value, slope


@triton.jit
def load_pair(z, row, col, n, live, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The gate and up numbers, float32, and their places in z. Ungated, up is the gate."""
    if GATED:
        at = row * (2 * n) + (2 * col if INTERLEAVED else col)
        beside = at + (1 if INTERLEAVED else n)
    else:
        at = row * n + col
        beside = at
    g = tl.load(z + at, live, 0.0).to(tl.float32)
    u = tl.load(z + beside, live, 0.0).to(tl.float32)
    return g, u, at, beside


@launched
@triton.jit
def gate_kernel(
    z,
    h,
    n,
    limit,
    alpha,
    up_offset,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, c): BLOCK numbers of row r of h."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, u, _, _ = load_pair(z, row, col, n, col < n, GATED, INTERLEAVED)
    if LIMITED:
        g = tl.where(g > limit, limit, g)  # a NaN stays
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    value, _ = activated(g, alpha, ACTIVATION)
    if GATED:
        value = value * (u + up_offset)
    tl.store(h + row * n + col, stored(value, h), col < n)


def gate(z: Tensor, h: Tensor, options: Gate) -> None:
    """h [rows, n] of z [rows, N]."""
    rows, n = h.shape
    if h.numel():
        grid = (rows, -(-n // BLOCK))  # the second axis has at most 65,535 programs
        gate_kernel[grid](z, h, n, *options.numbers, **options.constants, BLOCK=BLOCK, num_warps=4)


@launched
@triton.jit
def gate_backward_kernel(
    z,
    dh,
    weights,
    h,
    dz,
    dots,
    n,
    limit,
    alpha,
    up_offset,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program r: row r. h, dz and dots may each be None."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < n
        raw, u, at, beside = load_pair(z, row, col, n, live, GATED, INTERLEAVED)
        g, up = raw, u
        if LIMITED:
            g = tl.where(raw > limit, limit, raw)
            up = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        value, slope = activated(g, alpha, ACTIVATION)
        factor = tl.full([BLOCK], 1.0, tl.float32)
        if GATED:
            factor = up + up_offset
        d = tl.load(dh + row * n + col, live, 0.0)
        dw = d * weight
        made = stored(value * factor, z).to(tl.float32)
        sums += tl.where(live, d * made, 0.0)
        if h is not None:
            tl.store(h + row * n + col, stored(weight * made, h), live)
        if dz is not None:
            dg, du = dw * factor, dw * value
            dg *= slope
            if ACTIVATION == "relu" or ACTIVATION == "relu2":  # they drop an infinite dg, too
                dg = tl.where(g <= 0, 0.0, dg)
            if LIMITED:  # a NaN passes no gradient, as in torch's clamp
                dg = tl.where(raw <= limit, dg, 0.0)
                du = tl.where(tl.abs(u) <= limit, du, 0.0)
            tl.store(dz + at, stored(dg, dz), live)
            if GATED:
                tl.store(dz + beside, stored(du, dz), live)
    if dots is not None:
        tl.store(dots + row, tl.sum(sums, 0))


def gate_backward(
    z: Tensor,
    dh: Tensor,
    weights: Tensor,
    h: Tensor | None,
    dz: Tensor | None,
    dots: Tensor | None,
    options: Gate,
) -> None:
    """dz = weight dh h'(z), h = weight h(z), dots = the sums of dh h(z). dh, weights: float32."""
    rows, n = dh.shape
    if rows:
        gate_backward_kernel[(rows,)](
            z,
            dh,
            weights,
            h,
            dz,
            dots,
            n,
            *options.numbers,
            **options.constants,
            BLOCK=BLOCK,
            num_warps=4,
        )


@launched
@triton.jit
def sum_slots_kernel(
    rows, places, index, weights, bias, out, experts, choices, n, BLOCK: tl.constexpr
):
    """Program (t, c): BLOCK numbers of token t, summed over its choices in their order."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for choice in range(0, choices):
        slot = token * choices + choice
        expert = tl.load(index + slot)
        if (expert >= 0) & (expert < experts):
            v = tl.load(rows + tl.load(places + slot) * n + col, col < n, 0.0)
            if bias is not None:
                v += tl.load(bias + expert * n + col, col < n, 0.0).to(tl.float32)
            if weights is not None:
                v *= tl.load(weights + slot)
            sums += v
    tl.store(out + token * n + col, stored(sums, out), col < n)


def sum_slots(
    routing: Routing, rows: Tensor, weights: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """out [tokens, n] = the sums of a token's rows, float32 [rows, n], plus bias, weighted."""
    tokens, n = out.shape
    if out.numel():
        sum_slots_kernel[(tokens, -(-n // BLOCK))](
            rows,
            routing.places,
            routing.index,
            weights,
            bias,
            out,
            routing.experts,
            routing.choices,
            n,
            BLOCK=BLOCK,
            num_warps=4,
        )
