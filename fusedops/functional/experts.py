"""experts: the feed-forward block of a mixture of experts, and its quantized weights."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fusedops.extension import _C, ops, traced
from fusedops.functional.quantized_linear import QuantizedWeight, dequantize_weight, quantize_weight
from fusedops.functional.sharded import sharded_call

__all__ = ["dequantize_experts", "experts", "quantize_experts"]


def experts(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str | None = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    compute: str | None = None,
) -> Tensor:
    """The chosen experts' MLPs of each token, summed with the routing weights.

        z = gate_up[e] x + gate_up_bias[e]              e = top_k_index[t, j], x = hidden[t]
        g, u = z's halves, or its even and odd elements if interleaved
        g = min(g, limit), u = clamp(u, -limit, limit)  with a limit
        h = activation(g) (u + up_offset)               gated=False: h = activation(z)
        y[t] = sum over j of top_k_weights[t, j] (down[e] h + down_bias[e])

    hidden: [tokens, H]. top_k_index: int64 [tokens, k], from 0 to E; a choice of E contributes
    nothing (expert parallelism marks other ranks' experts so). top_k_weights: [tokens, k], any
    floating dtype. gate_up: [E, 2 I, H], down: [E, H, I], any strides; transposed=True: [E, H, 2 I]
    and [E, I, H]; gated=False: I instead of 2 I. gate_up_bias: [E, 2 I], down_bias: [E, H].
    activation: `linear`'s, or "relu2", relu(g)^2; "silu" is g sigmoid(alpha g). float32, float16
    and bfloat16 have kernels; torch's functions compute float64. Returns y, [tokens, H],
    contiguous, in hidden's dtype; sums are float32, the last one over a token's choices in their
    order. Only chosen experts' weights are read, and the others get gradients of 0. A token's
    result depends on other tokens only through the kernel that an expert's number of rows selects.

    Both weights may instead be QuantizedWeights from `quantize_experts`, of one format. Then
    hidden, the routing weights and the biases get gradients, from the same codes. compute: the
    precision of their products' operands, None, "exact" or "bf16", as in `quantized_linear`.

    Raises RuntimeError if a shape or dtype does not fit, ValueError for an unknown activation or
    options that do not go together, and TypeError if one weight is a QuantizedWeight and the other
    is not. An index outside 0 to E raises ValueError; under torch.func it contributes nothing.
    Shazeer et al., arXiv:1701.06538; gpt-oss, arXiv:2508.10925.
    """
    options: dict[str, Any] = {"activation": activation, "gated": gated, "limit": limit}
    options |= {"interleaved": interleaved, "alpha": alpha, "up_offset": up_offset}
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    tensors = hidden, top_k_index, top_k_weights
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        if transposed:
            raise ValueError("experts: transposed needs weights that are tensors")
        weights, layout = _quantized(gate_up, down, compute)
        op = _operator("quantized_experts", *tensors, *weights, *biases.values())
        return op(*tensors, *weights, *biases.values(), *layout, **options)
    if compute is not None:
        raise ValueError(f"experts: compute needs QuantizedWeights, got {compute!r} with tensors")
    options |= {**biases, "transposed": transposed}
    if type(hidden) is Tensor and not traced(*tensors, gate_up, down, *biases.values()):
        return _C.experts(*tensors, gate_up, down, **options)
    with sharded_call(0.0, *tensors, gate_up, down):
        return ops.experts(*tensors, gate_up, down, **options)


def _operator(name: str, *tensors: Tensor | None):
    return getattr(ops if traced(*tensors) else _C, name)


def _quantized(gate_up, down, compute) -> tuple[tuple, tuple]:
    """Both weights' tensors, and the operator's arguments that say how to read them."""
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, QuantizedWeight) or weight.experts is None:
            got = "one expert's" if isinstance(weight, QuantizedWeight) else type(weight).__name__
            raise TypeError(
                f"experts: {name} must be a QuantizedWeight from quantize_experts like the other"
                f" weight, got {got}"
            )
    if gate_up.format != down.format:
        raise ValueError(
            f"experts: both weights must have one format, got {gate_up.format} and {down.format}"
        )
    if gate_up.in_features != down.out_features or gate_up.experts != down.experts:
        raise RuntimeError(
            f"experts: gate_up must be [E, N, H] and down [E, H, I], got {list(gate_up.shape)} and"
            f" {list(down.shape)}"
        )
    tensors = (*_operands(gate_up), *_operands(down))
    return tensors, (gate_up.format, down.in_features, gate_up.group_size, down.group_size, compute)


def _operands(q: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    return q.qweight, q.scales, q.zeros


def quantize_experts(
    weight: Tensor, format: str, *, group_size: int | None = None, scale: str | None = None
) -> QuantizedWeight:
    """Quantizes a weight [E, N, K], each expert by itself: `quantize_weight`'s tensors, stacked.

    The arguments and errors are those of `quantize_weight`. Raises TypeError if weight is not a
    floating-point tensor of three dimensions. At most one expert is in float32 at a time.
    """
    if not isinstance(weight, Tensor) or weight.dim() != 3 or not weight.is_floating_point():
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight)
        raise TypeError(f"quantize_experts: weight must be floating-point [E, N, K], got {got}")
    # Without experts, one of zeros gives the shapes.
    each = weight if len(weight) else weight.new_zeros(1, *weight.shape[1:])
    size: dict[str, Any] = {"group_size": group_size, "scale": scale}
    first = quantize_weight(each[0], format, **size)
    stacked = [t.new_empty((len(weight), *t.shape)) for t in first.tensors().values()]
    for e in range(len(weight)):
        quantized = first if e == 0 else quantize_weight(weight[e], format, **size)
        for into, t in zip(stacked, quantized.tensors().values(), strict=True):
            into[e] = t
    named: dict[str, Any] = dict(zip(("qweight", "scales", "zeros"), stacked, strict=False))
    return dataclasses.replace(first, **named, experts=len(weight))


def dequantize_experts(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dequantized weight [E, N, K] of `quantize_experts`; see `dequantize_weight`."""
    if not isinstance(weight, QuantizedWeight) or weight.experts is None:
        raise TypeError("dequantize_experts: weight must be a QuantizedWeight of quantize_experts")
    out = weight.qweight.new_empty(weight.shape, dtype=dtype)
    for e in range(weight.experts):
        out[e] = dequantize_weight(_expert(weight, e), dtype)
    return out


def _expert(weight: QuantizedWeight, e: int) -> QuantizedWeight:
    """One expert's weight, without a copy."""
    zeros = None if weight.zeros is None else weight.zeros[e]
    qweight, scales = weight.qweight[e], weight.scales[e]
    return dataclasses.replace(weight, qweight=qweight, scales=scales, zeros=zeros, experts=None)
