"""FLOP formulas of linear, for torch's flop counter."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["FORMULAS"]


def linear_forward(input: Tensor, weight: Tensor, **_: Any) -> int:
    return 2 * input.numel() * weight.shape[0]


def linear_backward(
    dy: Tensor, input: Tensor | None, weight: Tensor | None, output_mask: Sequence[bool], **_: Any
) -> int:
    """The node keeps the input for the weight's gradient, and the weight for the input's."""
    products = sum(output_mask[:2])
    held = weight if input is None else input
    return 2 * dy.numel() * held.shape[-1] * products if products and held is not None else 0


FORMULAS: dict[str, Callable[..., int]] = {
    "fusedops::linear_forward": linear_forward,
    "fusedops::linear_backward": linear_backward,
}
