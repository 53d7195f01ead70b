"""FLOP formulas of quantized_linear, for torch's flop counter."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["FORMULAS"]


def quantized_linear_forward(x: Tensor, out_features: int, **_: Any) -> int:
    return 2 * x.numel() * out_features


def quantized_linear_backward(
    dy: Tensor, in_features: int, output_mask: Sequence[bool], **_: Any
) -> int:
    return 2 * dy.numel() * in_features * output_mask[0]


FORMULAS: dict[str, Callable[..., int]] = {
    "fusedops::quantized_linear_forward": quantized_linear_forward,
    "fusedops::quantized_linear_tiles": quantized_linear_forward,
    "fusedops::quantized_linear_backward": quantized_linear_backward,
}
