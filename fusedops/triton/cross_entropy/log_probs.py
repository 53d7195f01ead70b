"""linear_log_probs on GPUs, by torch's operators on one tile of logits at a time.

A tile is all rows of a stripe of classes, in float32. Row sums continue from stripe to stripe in
float64, relative to the largest z so far. The backward makes the tiles again. There is no kernel
of its own yet: torch's operators pass over a tile several times, in the L2 cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.triton.cross_entropy.linear import Gradients, Head, float32_like, product, put

FAR = 256.0  # exp(-FAR) is 0; an infinite difference times 0 would be NaN


def linear_log_probs_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    ignore_index: int,
    scalars: Sequence[float],
    dtype: torch.dtype,
    requested: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """fusedops::linear_log_probs_forward; see csrc/ops/cross_entropy/operators.h.

    Returns (log_probs, entropy, top1, lse, mean), None for what was not requested.
    """
    sums = Sums(target, ignore_index)
    with torch.accelerator.device_index(input.device.index):
        for first, x, _ in Head(input, linear_weight, linear_bias).stripes():
            if x.shape[1]:
                sums.add(z_of(x, linear_bias, first, scalars).z, first)
        return sums.results(dtype, *requested)


def linear_log_probs_backward(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    lse: Tensor,
    mean: Tensor | None,
    ignore_index: int,
    scalars: Sequence[float],
    output_mask: Sequence[bool],
) -> Gradients:
    """The operator fusedops::linear_log_probs_backward.

    Returns (dinput, dlinear_weight, dlinear_bias), None where output_mask is False.
    """
    head = Head(input, linear_weight, linear_bias)
    dinput, dlinear_weight, dlinear_bias = head_gradients = head.empty_gradients(output_mask)
    sum_of_dinput = float32_like(dinput)
    dead = (target == ignore_index).unsqueeze(1)
    with torch.accelerator.device_index(input.device.index):
        for first, x, dx in head.stripes():
            z, slope = z_of(x, linear_bias, first, scalars)
            dz = torch.zeros_like(z)
            p = difference(z, lse).exp()
            if grad_log_probs is not None:
                classes = torch.arange(first, first + x.shape[1], device=x.device)
                dz += (target.unsqueeze(1) == classes).float().sub_(p) * column(grad_log_probs)
            if grad_entropy is not None and mean is not None:
                dz -= p * difference(z, mean).clamp(min=-FAR) * column(grad_entropy)
            dx.copy_((dz * slope).masked_fill_(dead, 0))
            stripe = slice(first, first + x.shape[1])
            if sum_of_dinput is not None:
                product(dx, linear_weight[stripe], sum_of_dinput, add=first > 0)
            if dlinear_weight is not None:
                product(dx.t(), input, dlinear_weight[stripe])
            if dlinear_bias is not None:
                dlinear_bias[stripe].copy_(dx.sum(0, dtype=torch.float32))
        put(sum_of_dinput, dinput)
    return head_gradients


def column(grad: Tensor) -> Tensor:
    return grad.float().unsqueeze(1)


def difference(z: Tensor, row_values: Tensor) -> Tensor:
    """z - of_row, float32, as exact as if both were float64. of_row: [rows] float64."""
    near = row_values.float()
    return z - column(near) - column(row_values - near)


class Point(NamedTuple):
    """z, and its derivative by the logit."""

    z: Tensor
    slope: Tensor | float


def z_of(x: Tensor, bias: Tensor | None, first: int, scalars: Sequence[float]) -> Point:
    """x: the logits [rows, n] of classes [first, first + n), without the bias."""
    scale, softcap = scalars
    if bias is not None:
        x = x + bias[first : first + x.shape[1]].float()
    if not softcap:
        return Point(x * scale, scale)
    bent = torch.tanh(x * (scale / softcap))
    return Point(bent * softcap, (1 - bent * bent) * scale)


class Sums:
    """Each row's sums over the stripes so far. A target that is not a class gives NaN."""

    def __init__(self, target: Tensor, ignore_index: int):
        self.target, self.live = target, target != ignore_index
        rows = torch.zeros(target.shape, dtype=torch.float64, device=target.device)
        self.base = rows.float() - torch.inf  # the largest z
        self.exponentials, self.moment, self.of_target = rows, rows.clone(), rows + torch.nan
        self.top = torch.zeros_like(self.live)

    def add(self, z: Tensor, first: int) -> None:
        largest, best = z.max(1)
        base = torch.maximum(self.base, largest)
        self.top = torch.where(largest > self.base, best + first == self.target, self.top)
        finite = torch.where(base == -torch.inf, 0, base)  # -inf: every class so far is masked
        below = (z - column(finite)).clamp_(min=-FAR)
        e = below.exp()
        shift = (self.base.double() - finite).clamp(min=-FAR)  # -inf in the first stripe
        self.moment = (self.moment + self.exponentials * shift) * shift.exp()
        self.moment += e.mul(below).sum(1, dtype=torch.float64)
        self.exponentials = self.exponentials * shift.exp() + e.sum(1, dtype=torch.float64)
        self.base = base
        place = self.target - first
        here = (place >= 0) & (place < z.shape[1])
        at = z.gather(1, torch.where(here, place, 0).unsqueeze(1)).squeeze(1)
        self.of_target = torch.where(here, at.double(), self.of_target)

    def results(self, dtype: torch.dtype, entropy: bool, top1: bool) -> tuple[Tensor | None, ...]:
        log_sum = self.exponentials.log()
        lse, moment = self.base + log_sum, self.moment / self.exponentials
        log_probs = self.of_target - self.base - log_sum

        def put(t: Tensor) -> Tensor:
            return torch.where(self.live, t, 0)

        return (
            put(log_probs).to(dtype),
            put(log_sum - moment).to(dtype) if entropy else None,
            self.live & self.top & ~log_probs.isnan() if top1 else None,
            put(lse),
            put(self.base + moment) if entropy else None,
        )
