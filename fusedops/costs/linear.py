"""FLOP and byte formulas of linear."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusedops.costs.traffic import Formula, Traffic, moved, once, passes

__all__ = ["FLOPS", "TRAFFIC"]


def linear_forward(input: Tensor, weight: Tensor, **_: Any) -> int:
    return 2 * input.numel() * weight.shape[0]


def linear_backward(
    dy: Tensor, input: Tensor | None, weight: Tensor | None, output_mask: Sequence[bool], **_: Any
) -> int:
    """One product per gradient. An operand that no gradient needs may be None."""
    products = sum(output_mask[:2])
    held = weight if input is None else input
    return 2 * dy.numel() * held.shape[-1] * products if products and held is not None else 0


FLOPS: dict[str, Callable[..., int]] = {
    "fusedops::linear_forward": linear_forward,
    "fusedops::linear_backward": linear_backward,
}


# Byte formulas.


def _backward_traffic(dy, input, weight, z, output_mask, **_):
    """Each gradient reads dz again: dy itself, or what an activation makes of dy and z."""
    needs_dinput, needs_dweight = output_mask[:2]
    unread = (*["input"] * (not needs_dweight), *["weight"] * (not needs_dinput))
    times = sum(output_mask) - (z is None)
    distance = moved(dy, weight if needs_dinput else input)
    return Traffic(unread, passes((times, moved(dy), distance)))


TRAFFIC: dict[str, Formula] = {"linear_forward": once, "linear_backward": _backward_traffic}
