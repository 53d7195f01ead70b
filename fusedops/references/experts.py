"""The definition of experts, for weights in floats and quantized ones.

Plain PyTorch, exact for float64 inputs. Sums over a token's choices are float32, the products'
results have the inputs' dtype, as in transformers' modules.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.references.linear import ACTIVATIONS as OF_LINEAR
from fusedops.references.quantized_linear import quantized_linear_reference

ACTIVATIONS = {**OF_LINEAR, "relu2": lambda z: torch.relu(z).square()}


def experts_reference(
    hidden,
    top_k_index,
    top_k_weights,
    gate_up,
    down,
    *,
    gate_up_bias=None,
    down_bias=None,
    activation="silu",
    gated=True,
    interleaved=False,
    transposed=False,
    limit=None,
    alpha=1.0,
    up_offset=0.0,
    compute=None,
):
    gate = (activation, gated, interleaved, limit, alpha, up_offset)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    y = torch.zeros_like(hidden, dtype=wide)
    matmuls = (_matmuls(weight, transposed, compute) for weight in (gate_up, down))
    for e, (first, second) in enumerate(zip(*matmuls, strict=True)):
        token, choice = torch.where(top_k_index == e)
        b_in, b_out = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
        o = second(gate_reference(first(hidden[token], bias=b_in), *gate), bias=b_out)
        y = y.index_add(0, token, o.to(wide) * top_k_weights[token, choice, None].to(wide))
    return y.to(hidden.dtype)


def quantized_experts_reference(
    hidden, index, slots, w1, s1, z1, w2, s2, z2, b1, b2, format, inner, group1, group2,
    compute=None, **options,
):  # fmt: skip
    """The operator's arguments: gate_up's tensors are w1, s1 and z1, down's w2, s2 and z2."""
    wide = 2 * inner if options.get("gated", True) else inner
    first = _Codes(format, wide, hidden.shape[1], group1, w1, s1, z1)
    second = _Codes(format, hidden.shape[1], inner, group2, w2, s2, z2)
    options |= {"gate_up_bias": b1, "down_bias": b2, "compute": compute}
    return experts_reference(hidden, index, slots, first, second, **options)


class _Codes(NamedTuple):
    """What a QuantizedWeight of `quantize_experts` has."""

    format: str
    out_features: int
    in_features: int
    group_size: int
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None


def _matmuls(weight, transposed, compute):
    """Each expert's matmul. Uses unbind: the gradient of weight[e] is as large as weight."""
    if isinstance(weight, Tensor):
        each = weight.transpose(1, 2) if transposed else weight
        return [partial(F.linear, weight=w) for w in each.unbind()]
    layout = {"format": weight.format, "group_size": weight.group_size, "compute": compute}
    layout |= {"out_features": weight.out_features, "in_features": weight.in_features}
    zeros = [None] * len(weight.qweight) if weight.zeros is None else weight.zeros
    return [
        partial(quantized_linear_reference, qweight=q, scales=s, zeros=z, **layout)
        for q, s, z in zip(weight.qweight, weight.scales, zeros, strict=True)
    ]


def gate_reference(z, activation, gated, interleaved, limit, alpha, up_offset):
    act = ACTIVATIONS[activation]
    if activation == "silu":

        def act(g):
            return g * torch.sigmoid(alpha * g)

    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    if not gated:
        return act(wide).to(z.dtype)
    g, u = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (act(g) * (u + up_offset)).to(z.dtype)
