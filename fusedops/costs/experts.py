"""FLOP and byte formulas of experts.

A token's choice that names no expert counts like any other choice.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusedops.costs.traffic import Formula, Traffic, once

__all__ = ["FLOPS", "TRAFFIC"]


def _products(top_k_index: Tensor, *weights: Tensor) -> int:
    """FLOPs of each choice's products with one expert's weights."""
    return 2 * top_k_index.numel() * sum(w.numel() // max(len(w), 1) for w in weights)


def experts_forward(top_k_index: Tensor, gate_up: Tensor, down: Tensor, **_: Any) -> int:
    return _products(top_k_index, gate_up, down)


def experts_backward(
    top_k_index: Tensor, gate_up: Tensor, down: Tensor, output_mask: Sequence[bool], **_: Any
) -> int:
    """Products for the gradients in output_mask; dy times down is needed for each of them."""
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
    """dy times down, and dz times gate_up if hidden gets a gradient."""
    columns = inner + (2 if gated else 1) * inner * output_mask[0]
    return 2 * top_k_index.numel() * hidden.shape[1] * columns


FLOPS: dict[str, Callable[..., int]] = {
    "fusedops::experts_forward": experts_forward,
    "fusedops::experts_backward": experts_backward,
    "fusedops::quantized_experts_forward": quantized_experts_forward,
    "fusedops::quantized_experts_backward": quantized_experts_backward,
}


# Byte formulas, for calls that choose every expert. Rows that are gathered, and what the products
# leave for each other, count as tiles in a cache.


def _backward_traffic(output_mask, **_):
    """An operand that only a skipped gradient needs is not read.

    gate_up_bias is never read: z includes it.
    """
    needed_by = {"gate_up": 0, "hidden": 2, "down_bias": 1}
    unread = [name for name, place in needed_by.items() if not output_mask[place]]
    return Traffic(("gate_up_bias", *unread))


def _quantized_backward_traffic(gate_up_zeros, down_zeros, output_mask, **_):
    """As without quantization; hidden is needed by no weight's gradient."""
    unread = ["gate_up_bias", "hidden", *["down_bias"] * (not output_mask[1])]
    if not output_mask[0]:
        unread += ["gate_up", "gate_up_scales", *["gate_up_zeros"] * (gate_up_zeros is not None)]
    return Traffic(tuple(unread))


TRAFFIC: dict[str, Formula] = {
    "experts_forward": once,
    "experts_backward": _backward_traffic,
    "quantized_experts_forward": once,
    "quantized_experts_backward": _quantized_backward_traffic,
}
