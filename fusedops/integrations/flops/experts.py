"""FLOP formulas of experts, for torch's flop counter.

A token's choice that names no expert counts like any other choice.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["FORMULAS"]


def _products(top_k_index: Tensor, *weights: Tensor) -> int:
    """Of each choice with one expert's weights."""
    return 2 * top_k_index.numel() * sum(w.numel() // max(len(w), 1) for w in weights)


def experts_forward(top_k_index: Tensor, gate_up: Tensor, down: Tensor, **_: Any) -> int:
    return _products(top_k_index, gate_up, down)


def experts_backward(
    top_k_index: Tensor, gate_up: Tensor, down: Tensor, output_mask: Sequence[bool], **_: Any
) -> int:
    """The first product, of dy and down, is always there."""
    weights = [down, *[gate_up] * sum((output_mask[0], output_mask[2])), *[down] * output_mask[3]]
    return _products(top_k_index, *weights)


def quantized_experts_forward(
    hidden: Tensor, top_k_index: Tensor, inner: int, gated: bool, **_: Any
) -> int:
    return 2 * top_k_index.numel() * hidden.shape[1] * inner * (3 if gated else 2)


def quantized_experts_backward(
    hidden: Tensor,
    top_k_index: Tensor,
    inner: int,
    gated: bool,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """Of dy and down, and for hidden's gradient of dz and gate_up."""
    columns = inner + (2 if gated else 1) * inner * output_mask[0]
    return 2 * top_k_index.numel() * hidden.shape[1] * columns


FORMULAS: dict[str, Callable[..., int]] = {
    "fusedops::experts_forward": experts_forward,
    "fusedops::experts_backward": experts_backward,
    "fusedops::quantized_experts_forward": quantized_experts_forward,
    "fusedops::quantized_experts_backward": quantized_experts_backward,
}
