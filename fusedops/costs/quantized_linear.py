"""FLOP and byte formulas of quantized_linear."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusedops.costs.traffic import Formula, Traffic, blocks, once, reads

__all__ = ["FLOPS", "TRAFFIC"]


def quantized_linear_forward(x: Tensor, out_features: int, **_: Any) -> int:
    return 2 * x.numel() * out_features


def quantized_linear_backward(
    dy: Tensor, in_features: int, output_mask: Sequence[bool], **_: Any
) -> int:
    return 2 * dy.numel() * in_features * output_mask[0]


FLOPS: dict[str, Callable[..., int]] = {
    "fusedops::quantized_linear_forward": quantized_linear_forward,
    "fusedops::quantized_linear_tiles": quantized_linear_forward,
    "fusedops::quantized_linear_backward": quantized_linear_backward,
}


# Byte formulas. csrc/cpu decodes all codes for each block of 256 rows forward and of 128 rows
# backward.


def _forward_traffic(x, qweight, scales, zeros, **_):
    return Traffic(again=reads(blocks(x, 256), qweight, scales, zeros))


def _backward_traffic(dy, qweight, scales, zeros, z, output_mask, **_):
    dz_reads = reads(sum(output_mask) + (z is not None), dy)
    if not output_mask[0]:
        return Traffic(("qweight", "scales", "zeros"), dz_reads)
    return Traffic(again=dz_reads + reads(blocks(dy, 128), qweight, scales, zeros))


TRAFFIC: dict[str, Formula] = {
    "quantized_linear_forward": _forward_traffic,
    "quantized_linear_tiles": _forward_traffic,
    "quantized_linear_backward": _backward_traffic,
    "dequantize_weight": once,
    "quantize_groups": once,
}
