"""The definitions of quantized_linear and of quantizing and dequantizing a weight.

Plain PyTorch. Every step is one float32 operation per element, and sums add halves, so that no
device, instruction set or thread count changes a byte. fusedops/functional/quantized_linear.py
describes the formats.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fusedops.references.linear import ACTIVATIONS
from fusedops.references.quantized_rows import (
    LARGEST,
    SMALLEST,
    finite_or_nan,
    inverse,
    quantized_rows_reference,
    rounded_rows,
)

NF4_BLOCK = 64

# Quantiles of a normal distribution; 0 and both ends are exact.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A weight format's tensors, and the options that `quantize_weight` accepts for it.

    csrc/kernels/weight_formats.h has these properties too, beside others that only kernels need.
    """

    bits: int  # of a code
    dtype: torch.dtype = torch.uint8  # of the tensor of codes; two codes of 4 bits are a byte
    flat: bool = False  # groups cover the flattened weight, not each row
    has_zeros: bool = False  # w = (q - zero) scale
    integers: bool = False  # q is an integer
    group_size: int | None = None  # the default; None: a row
    group_sizes: tuple[int, ...] | None = ()  # the choices; none: only the default; None: any
    scales: tuple[str, ...] = ("absmax",)  # how a group's scale is chosen; the default first
    scales_name: str = "scales"  # in a state dict

    def bytes_per_element(self, group_size: int | None = None) -> float:
        """The size of a code and its part of the scale and zero, in a weight of long rows."""
        group = group_size or self.group_size or math.inf
        return self.bits / 8 + (4 + self.has_zeros) / group


FORMATS = {
    "int8": Format(8, torch.int8, integers=True, group_sizes=None),
    "int4": Format(
        4,
        has_zeros=True,
        integers=True,
        group_size=64,
        group_sizes=(32, 64, 128),
        scales=("mse", "absmax"),
    ),
    "nf4": Format(
        4, flat=True, group_size=NF4_BLOCK, scales=("absmax", "mse"), scales_name="absmax"
    ),
    "fp8": Format(8, torch.float8_e4m3fn),
}

SHARES = {  # fractions of the covering scale that "mse" tries; the first of equals wins
    "int4": tuple(p / 100 for p in (100, 103, *range(97, 69, -3))),
    "nf4": tuple(p / 100 for p in (100, *range(110, 100, -2), *range(98, 70, -2))),
}
ELEMENTS_AT_ONCE = 1 << 20


def quantize_weight_reference(weight, format, group_size, scale):
    return in_groups(quantize_groups_reference, weight, format, group_size, scale)


def quantize_groups_reference(groups, format, shares):
    """Quantizes groups [groups, size] in parts: codes, scales [groups], zeros [groups]."""
    at_once = max(ELEMENTS_AT_ONCE // groups.shape[1], 1)
    parts = [_quantize_groups(part, format, shares) for part in groups.split(at_once)]
    codes, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes, scales, zeros if FORMATS[format].has_zeros else None


def dequantize_weight_reference(
    qweight, scales, zeros, format, out_features, in_features, group_size, dtype
):
    n, k = out_features, in_features
    scales = scales.to(torch.promote_types(dtype, torch.float32))
    if format == "nf4":
        table = torch.tensor(NF4, dtype=scales.dtype, device=qweight.device)
        values = table[_halves(qweight.view(-1))[: n * k].int()]
        return (values * _spread(scales, NF4_BLOCK)[: n * k]).view(n, k).to(dtype)
    codes = _halves(qweight)[:, :k] if FORMATS[format].bits == 4 else qweight
    codes = codes.to(scales.dtype)
    if zeros is not None:
        codes = codes - _spread(zeros, group_size)[:, :k]
    return (codes * _spread(scales, group_size)[:, :k]).to(dtype)


def quantized_linear_reference(
    x, qweight, scales, zeros, bias, format, out_features, in_features, group_size,
    activation=None, input_format=None, compute=None, x_scale=None, out_dtype=None,
):  # fmt: skip
    wide = torch.promote_types(out_dtype or x.dtype, torch.float32)
    layout = format, out_features, in_features, group_size
    weight, factors = operands_reference(qweight, scales, zeros, *layout, wide)
    x = x if x_scale is None else x.to(wide) * x_scale.to(wide)
    of_codes = None if x_scale is None else out_dtype
    return product_reference(x, weight, factors, bias, activation, input_format, compute, of_codes)


def operands_reference(
    qweight, scales, zeros, format, out_features, in_features, group_size, dtype
):
    """The matmul's weight operand, and the factors [N] that scale its sums, or None.

    If each row has one scale, the operand is the codes themselves, which are exact in bfloat16.
    """
    layout = format, out_features, in_features, group_size, dtype
    if format not in LARGEST or scales.shape[1] != 1:
        return dequantize_weight_reference(qweight, scales, zeros, *layout), None
    codes = dequantize_weight_reference(qweight, torch.ones_like(scales), zeros, *layout)
    return codes, scales[:, 0].to(dtype)


def product_reference(x, weight, factors, bias, activation, input_format, compute, of_codes=None):
    """The matmul of `operands_reference`'s result, in x's dtype or wider.

    None means "bf16", the lowest precision that it allows, and the operator's "any" means "exact".
    float64 rounds only 8-bit inputs. of_codes: y's dtype if x has been rounded to codes.
    """
    wide, dtype = weight.dtype, of_codes or x.dtype
    quantizes = input_format not in (None, "none")
    a = (rounded_rows(x, input_format) if quantizes and not of_codes else x).to(wide)
    rounds = wide == torch.float32 and compute in (None, "bf16")
    rounds_backward = wide == torch.float32 and compute not in ("exact", "any")
    z = _product(a, weight, rounds, rounds and not quantizes, rounds_backward)
    z = z if factors is None else z * factors
    z = (z if bias is None else z + bias.to(wide)).to(dtype)
    return ACTIVATIONS[None if activation == "none" else activation](z.to(wide)).to(dtype)


def _product(a, weight, rounds_weight, rounds_a, rounds_backward):
    """F.linear(a, weight) and its gradient, with operands optionally rounded to bfloat16."""
    if not rounds_backward:
        return F.linear(a, weight)
    narrow = weight.bfloat16().to(weight.dtype)
    if rounds_a:  # the gradient passes unrounded
        a = a + _difference(a.bfloat16(), a)
    z = F.linear(a, narrow)
    if not rounds_weight:
        z = z + F.linear(a, weight - narrow).detach()
    rounded = z.bfloat16()  # rounds the gradient too
    return rounded.to(z.dtype) + _difference(z, rounded)


def _difference(a, b):
    """a - b without a gradient; 0 for infinities and NaN."""
    return (a.detach().float() - b.detach().float()).nan_to_num(0, 0, 0)


def in_groups(run, weight, format, group_size, scale):
    """Cuts a weight into groups for `run`, and shapes the result for the format."""
    n, k = weight.shape
    weight = weight.detach().to(torch.float32)
    flat, bits = FORMATS[format].flat, FORMATS[format].bits
    rows = _padded(weight.reshape(1, -1) if flat else weight, group_size)
    groups, count = rows.numel() // group_size, rows.shape[1] // group_size
    shares = SHARES[format] if scale == "mse" else (1.0,)
    codes, scales, zeros = run(rows.reshape(groups, group_size), format, shares)
    if flat:
        return codes.view(-1, 1)[: (n * k + 1) // 2].contiguous(), scales, None
    codes = codes.view(n, codes.shape[1] * count)
    codes = codes[:, : (k + 1) // 2] if bits == 4 else codes[:, :k]
    zeros = None if zeros is None else zeros.view(n, count)
    return codes.contiguous(), scales.view(n, count), zeros


def _quantize_groups(w, format, shares):
    if format in LARGEST:
        codes, step = quantized_rows_reference(w, format)
        return codes, step[:, 0], torch.zeros_like(step[:, 0])
    candidates = _nf4_candidates(w, shares) if format == "nf4" else _int4_candidates(w, shares)
    codes, step, zero, least = next(candidates)
    for other in candidates:
        better = other[3] < least
        codes = torch.where(better[:, None], other[0], codes)
        step, zero, least = (
            torch.where(better, new, old)
            for new, old in zip(other[1:], (step, zero, least), strict=True)
        )
    return codes[:, ::2] << 4 | codes[:, 1::2], step, zero


def _nf4_candidates(w, shares):
    """Codes, absmax, zeros and squared error for each fraction of the largest element."""
    table = torch.tensor(NF4, dtype=torch.float32, device=w.device)
    middles = (table[1:] + table[:-1]) / 2
    largest = finite_or_nan(w.abs().amax(-1))
    for share in shares:
        absmax = largest * share
        scaled = w * absmax.clamp(min=SMALLEST).reciprocal()[:, None]
        codes = torch.bucketize(scaled.nan_to_num(0), middles, out_int32=True)
        error = _sum_of_squares(table[codes] * absmax[:, None] - w)
        yield codes.to(torch.uint8), absmax, torch.zeros_like(absmax), error


def _int4_candidates(w, shares):
    low, high = (finite_or_nan(t) for t in (w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)))
    for share in shares:
        step = (high - low) * (share / 15)
        per_step = inverse(step)
        zero = (low * -share * per_step).round().clamp(0, 15)
        codes = ((w * per_step[:, None]).round() + zero[:, None]).clamp(0, 15)
        error = _sum_of_squares((codes - zero[:, None]) * step[:, None] - w)
        codes, zero = (t.nan_to_num(0).to(torch.uint8) for t in (codes, zero))
        yield codes, step, zero, error


def _sum_of_squares(t):
    """[groups, size], size a power of two, -> [groups]: adds halves until one is left."""
    t = t * t
    while t.shape[-1] > 1:
        low, high = t.chunk(2, -1)
        t = low + high
    return t[:, 0]


def _padded(t, size):
    """Pads each row with zeros to a multiple of a size."""
    missing = -t.shape[-1] % size
    return F.pad(t, (0, missing)) if missing else t


def _halves(packed):
    low = packed.bitwise_and(15)  # the ONNX exporter supports `&` for bools only
    return torch.stack([packed >> 4, low], -1).flatten(-2)


def _spread(t, size):
    return t.repeat_interleave(size, -1)
