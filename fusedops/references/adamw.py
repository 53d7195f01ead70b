"""The definition of AdamW's step, its 8-bit codes, roundings and random numbers.

Plain PyTorch, exact for float64 tensors. `fusedops.optim.AdamW` has the formulas. If an element's
g^2 is not finite in float32, the element keeps its p, m and v; 8-bit moments are rounded again. If
the gradients' norm is not finite, or found_inf is set, the step changes nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # elements that share a scale and a key of random numbers
SQUARE_PARTS = 256  # a sum of squares is stored as this many partial sums
NEAREST, STOCHASTIC, REMAINDER = range(3)  # how a 16-bit parameter is rounded
KINDS = 5  # numbers per tensor: group, rounding, index, row of blocks, first block
OPTIONS = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "amsgrad", "bounded")

_MASK = (1 << 64) - 1


def adamw_step_reference(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    steps,
    max_exp_avg_sqs,
    scales,
    remainders,
    kinds,
    options,
    lrs,
    seed,
    squares=None,
    max_grad_norm=0.0,
    grad_scale=None,
    found_inf=None,
    host_table=None,
    table=None,
):
    factor = 1.0 if grad_scale is None else 1 / float(grad_scale)
    if squares is not None:
        norm = math.sqrt(float(squares.sum())) * factor
        if not math.isfinite(norm):
            return
        factor *= min(1.0, max_grad_norm / (norm + 1e-6))
    if found_inf is not None and float(found_inf) != 0:
        return
    rest = (iter(max_exp_avg_sqs), iter(scales), iter(remainders))
    for i, (p, g, m, v, step) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        group, rounding, index, row, first = kinds[KINDS * i : KINDS * (i + 1)]
        option = dict(zip(OPTIONS, options[len(OPTIONS) * group :], strict=False))
        if lrs:
            option["lr"] = float(lrs[group])
        step += 1
        maximum = next(rest[0]) if option["amsgrad"] else None
        scale = [next(rest[1]), next(rest[1])] if m.dtype == torch.int8 else None
        remainder = next(rest[2]) if rounding == REMAINDER else None
        draw = Random(adamw_key(seed, int(step), index), p.numel(), row, first, int(step))
        g = g.to(torch.promote_types(g.dtype, torch.float32))
        g = g * -factor if option["maximize"] else g * factor
        _step_one(p, g, m, v, maximum, scale, remainder, rounding, option, float(step), draw)


def _step_one(p, g, m, v, maximum, scale, remainder, rounding, option, t, draw):
    wide = torch.promote_types(p.dtype, torch.float32)
    master = with_remainder(p, remainder) if rounding == REMAINDER else p.to(wide)
    old_m, old_v = (
        decoded(m, v, scale[0], scale[1], draw.row) if scale else (m.to(wide), v.to(wide))
    )
    beta1, beta2, lr = option["beta1"], option["beta2"], option["lr"]
    keep = ~(g * g).isfinite()
    new_m = torch.where(keep, old_m, beta1 * old_m + (1 - beta1) * g)
    new_v = torch.where(keep, old_v, beta2 * old_v + (1 - beta2) * g * g)
    if scale and option["bounded"]:
        largest = max_ratio(beta1, beta2, t) * new_v.sqrt()
        new_m = new_m.clamp(-largest, largest)
    under_root = new_v if maximum is None else torch.maximum(maximum, new_v)
    denominator = under_root.sqrt() / math.sqrt(1 - beta2**t) + option["eps"]
    updated = master * (1 - lr * option["weight_decay"])
    updated = updated - lr / (1 - beta1**t) * new_m / denominator
    updated = torch.where(keep, master, updated)
    if maximum is not None:
        maximum.copy_(under_root)
    if scale:
        for tensor, value in zip(
            (m, v, *scale), encoded(new_m, new_v, draw.thresholds(), draw.row), strict=True
        ):
            tensor.copy_(value.reshape(tensor.shape))  # scales may be [rows, blocks of a row]
    else:
        m.copy_(new_m)
        rounds = v.dtype.itemsize == 2  # random numbers cost more than the rest of the step
        v.copy_(stochastic(new_v, draw.halves(SQUARE16), v.dtype) if rounds else new_v)
    if rounding == REMAINDER:
        for tensor, value in zip((p, remainder), split(updated), strict=True):
            tensor.copy_(value)
    elif rounding == STOCHASTIC:
        p.copy_(stochastic(updated, draw.halves(PARAM), p.dtype))
    else:
        p.copy_(updated)


def adamw_squares_reference(grads):
    wide = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in grads)
    total = torch.stack([g.double().square().sum() for g in wide]).sum(0, keepdim=True)
    return torch.nn.functional.pad(total, (0, SQUARE_PARTS - 1))


def adamw_scale_reference(grads, squares, max_norm):
    factor = (max_norm / (squares.sum().sqrt() + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(factor.to(g.dtype) if g.dtype == torch.float64 else factor.float())


# The 8-bit codes, whose roots are evenly spaced, and their rounding: csrc/kernels/adamw.h.


def max_ratio(beta1: float, beta2: float, t: float) -> float:
    """The largest |m| / sqrt(v) that t steps with these betas can give, plus a percent."""
    growth = beta1 * beta1 / beta2 if beta2 else math.inf
    power = t * math.log(growth) if growth else -math.inf
    if power > 700:
        return 1e15
    terms = t if growth == 1 else math.expm1(power) / (growth - 1)
    return min(1.01 * (1 - beta1) * math.sqrt(terms / (1 - beta2)), 1e15)


def blocks(t: Tensor, row: int = 0) -> Tensor:
    """t's elements in blocks, [blocks, BLOCK], each row padded with zeros to full blocks.

    row: elements per row; 0 means that t is one row.
    """
    rows = t.reshape(-1, row or max(t.numel(), 1)) if t.numel() else t.reshape(0, BLOCK)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).reshape(-1, BLOCK)


def unblocked(t: Tensor, like: Tensor, row: int = 0) -> Tensor:
    """The inverse of `blocks`: a tensor shaped like `like`."""
    row = row or like.numel()
    if not like.numel():
        return t.reshape(like.shape)
    return t.reshape(like.numel() // row, -1)[:, :row].reshape(like.shape)


def decoded(
    m: Tensor, v: Tensor, m_scale: Tensor, v_scale: Tensor, row: int = 0
) -> tuple[Tensor, Tensor]:
    """Dequantizes int8 and uint8 moment codes with scales [blocks]; keeps m's shape."""
    m_scale, v_scale = m_scale.reshape(-1, 1), v_scale.reshape(-1, 1)
    c = blocks(m, row).to(m_scale.dtype)
    root = (blocks(v, row).to(v_scale.dtype) + 1) * (v_scale / BLOCK)
    wide = c * c.abs() * (m_scale / 127**2), root**4
    wide_m, wide_v = (unblocked(w, m, row) for w in wide)
    return wide_m, wide_v


NEAREST_CODES = 1 << 15  # the threshold with which a code is rounded to nearest


def encoded(
    m: Tensor, v: Tensor, thresholds: Tensor | int = NEAREST_CODES, row: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes moments to int8 and uint8 codes of m's shape, and scales, for `decoded`.

    thresholds: 16 bits per element, [blocks, BLOCK]. A code's fractional part is rounded up if it
    is larger than 1 - threshold / 65536.
    """
    wide_m, root = blocks(m, row), blocks(v, row).sqrt()
    m_scale, max_root = wide_m.abs().amax(1), root.amax(1)

    def relative(t, largest, least):
        return t / torch.where(largest < least, torch.inf, largest)[:, None]

    # c^2 exceeds the square of c's mean by 1 / 6 on average
    square = relative(wide_m.abs(), m_scale, 1e-30) * 127**2
    size = torch.minimum(square, (square.clamp(min=0.2113248654) - 1 / 6).sqrt())
    up = torch.as_tensor(thresholds, dtype=torch.int64, device=m.device)
    c = (size * wide_m.sign() + ((up >> 8).to(m.dtype) + 0.5) / 256).floor()
    relative_root = relative(root, max_root, torch.finfo(torch.float32).tiny)
    d = (relative_root.sqrt() * 256 - 1 + (up.to(m.dtype) + 0.5) / 65536).floor().clamp(0, 255)
    m_codes, v_codes = (unblocked(t, m, row) for t in (c.to(torch.int8), d.byte()))
    return m_codes, v_codes, m_scale.float(), max_root.sqrt().float()


# 16-bit parameters.


def stochastic(t: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds t to `dtype` up or down at random. random: 16 bits per element, [t's elements]."""
    random = random.view(t.shape).to(t.device)
    if dtype in (torch.float32, torch.float64):
        return t.to(dtype)
    if dtype == torch.bfloat16:
        bits = (t.float().view(torch.int32) + random) & -0x10000
        return torch.where(t.isnan(), t.float(), bits.view(torch.float32)).to(dtype)
    # in units of the last place, at least 2^-24
    exponent = torch.frexp(t.float().abs()).exponent
    one, last = torch.ones_like(t, dtype=torch.float32), exponent.clamp(min=-13) - 11
    unit = torch.ldexp(one, last.float())  # ldexp of an int computes in the default dtype
    bits = torch.where(exponent < -13, random, random >> 3 << 3)
    rounded = (t.float().abs() / unit + bits.float() / 65536).floor() * unit
    return torch.copysign(torch.where(t.isfinite(), rounded, t.float().abs()), t).to(dtype)


def split(t: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 into a bfloat16 and the int16 remainder."""
    bits = t.float().view(torch.int32)
    bits = torch.where(t.isnan(), 0x7FC00000, bits)  # the sum of another NaN might be -0
    high = (bits + 0x8000) >> 16
    return (high << 16).view(torch.float32).bfloat16(), bits.to(torch.int16)


def with_remainder(p: Tensor, remainder: Tensor) -> Tensor:
    """Joins what `split` separated: the float32 value."""
    high = p.float().view(torch.int32)
    return (high + remainder.to(torch.int32)).view(torch.float32)


# Random numbers: a hash of (seed, step, parameter, element). csrc/kernels/adamw.h has the same.

PARAM, SQUARE16 = 64, 192  # each use's first word in a block's random numbers


def mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def adamw_key(seed: int, step: int, index: int) -> int:
    return mixed(mixed(mixed(seed & _MASK) ^ step) ^ index)


@dataclass(frozen=True)
class Random:
    """Random bits for a tensor of `numel` elements; each row starts a new block.

    row: elements per row; 0 means one row. first: number of blocks before this tensor's own.
    step: this step's number.
    """

    key: int
    numel: int
    row: int = 0
    first: int = 0
    step: int = 0

    def _blocks(self) -> int:
        row = self.row or self.numel
        return self.numel // row * -(-row // BLOCK) if self.numel else 0

    def words(self, begin: int, count: int) -> Tensor:
        """int64 [blocks, count]: each block's words, starting at `begin`."""
        keys = [mixed((self.key + self.first + block) & _MASK) for block in range(self._blocks())]
        low, high = (
            torch.tensor([k >> shift & 0xFFFFFFFF for k in keys], dtype=torch.int64, device="cpu")
            for shift in (0, 32)
        )
        x = torch.arange(begin, begin + count, device="cpu") ^ low[:, None]
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = x ^ high[:, None]
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    def thresholds(self) -> Tensor:
        """int64 [blocks, BLOCK]: 16 bits per element, evenly spread over the steps."""
        end = self.first + self._blocks()
        block = torch.arange(self.first, end, dtype=torch.int64, device="cpu")[:, None]
        element = torch.arange(BLOCK, dtype=torch.int64, device="cpu")
        return (25033 * self.step + 256 * (77 * block + 159 * element)) & 0xFFFF

    def halves(self, begin: int) -> Tensor:
        """int32 [numel]: 16 bits per element."""
        words = self.words(begin, BLOCK // 2)
        halves = torch.stack([words & 0xFFFF, words >> 16], -1).flatten(1)
        like = torch.empty(self.numel, dtype=torch.int32, device="meta")
        return unblocked(halves, like, self.row).to(torch.int32)
