"""FLOP and byte formulas of linear_cross_entropy and linear_log_probs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusedops.costs.traffic import Formula, Traffic, moved, once, passes

__all__ = ["FLOPS", "TRAFFIC"]


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


FLOPS: dict[str, Callable[..., int]] = {
    "fusedops::linear_cross_entropy_forward": linear_cross_entropy_forward,
    "fusedops::linear_cross_entropy_backward": linear_cross_entropy_backward,
    "fusedops::linear_log_probs_forward": linear_log_probs_forward,
    "fusedops::linear_log_probs_backward": linear_cross_entropy_backward,
}


# Byte formulas. Rows of ignored targets count like others. Sums of a gradient count as the
# gradient.

CLASSES = 1024  # per stripe, in csrc/cpu
LEAST_ROWS = 128  # of all classes at a time, in a forward that makes gradients


def _linear_forward_traffic(input, linear_weight, gradients, **_):
    (classes, features), rows = linear_weight.shape, input.shape[0]
    if not any(gradients):
        return Traffic(again=_stripes(rows, input, linear_weight, (False, False)))
    step = min(max(rows // 8, LEAST_ROWS), max(features, LEAST_ROWS))
    blocks = -(-rows // step)
    needs_dinput, needs_dweight = gradients[:2]
    size = moved(linear_weight)
    distance = size * (1 + needs_dweight) + step * classes * linear_weight.element_size()
    return Traffic(
        again=(
            *passes((blocks * (1 + needs_dinput) - 1, size, distance)),
            *passes((2 * blocks * needs_dweight, size, distance)),
            *_stripes(step, input, linear_weight, gradients),
        )
    )


def _linear_backward_traffic(input, linear_weight, output_mask, **_):
    stripe = moved(linear_weight[:CLASSES]) + moved(input[:CLASSES])
    return Traffic(
        again=(
            *passes((output_mask[0], moved(linear_weight), stripe)),
            *_stripes(input.shape[0], input, linear_weight, output_mask),
        )
    )


def _log_probs_traffic(input, linear_weight, **_):
    return _linear_forward_traffic(input, linear_weight, (False, False, False))


def _log_probs_backward_traffic(grad_entropy, **call):
    unread = ("mean",) if grad_entropy is None else ()
    return _linear_backward_traffic(**call)._replace(unread=unread)


def _stripes(rows, input, linear_weight, gradients):
    """For each stripe of classes, blocks of rows of the input and its gradient's sum move again."""
    stripes = -(-linear_weight.shape[0] // CLASSES)
    distance = moved(input[:rows]) + moved(linear_weight[:CLASSES])
    return passes(
        (stripes * (1 + gradients[1]) - 1, moved(input), distance),
        (2 * stripes * gradients[0], moved(input), distance),
    )


TRAFFIC: dict[str, Formula] = {
    "cross_entropy_forward": once,
    "cross_entropy_backward": once,
    "linear_cross_entropy_forward": _linear_forward_traffic,
    "linear_cross_entropy_backward": _linear_backward_traffic,
    "linear_log_probs_forward": _log_probs_traffic,
    "linear_log_probs_backward": _log_probs_backward_traffic,
}
