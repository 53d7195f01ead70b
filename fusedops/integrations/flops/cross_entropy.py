"""FLOP formulas of linear_cross_entropy and linear_log_probs, for torch's flop counter."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["FORMULAS"]


def linear_cross_entropy_forward(
    input: Tensor, linear_weight: Tensor, gradients: Sequence[bool], **_: Any
) -> int:
    """gradients: which of dinput, dweight, dbias the forward makes; the backward scales them."""
    return 2 * input.numel() * linear_weight.shape[0] * (1 + sum(gradients[:2]))


def linear_cross_entropy_backward(
    input: Tensor, linear_weight: Tensor, output_mask: Sequence[bool], **_: Any
) -> int:
    return 2 * input.numel() * linear_weight.shape[0] * sum(output_mask[:2])


def linear_log_probs_forward(input: Tensor, linear_weight: Tensor, **_: Any) -> int:
    return 2 * input.numel() * linear_weight.shape[0]


FORMULAS: dict[str, Callable[..., int]] = {
    "fusedops::linear_cross_entropy_forward": linear_cross_entropy_forward,
    "fusedops::linear_cross_entropy_backward": linear_cross_entropy_backward,
    "fusedops::linear_log_probs_forward": linear_log_probs_forward,
    "fusedops::linear_log_probs_backward": linear_cross_entropy_backward,
}
