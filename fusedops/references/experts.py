"""The definition of experts, for weights in floats and quantized ones.

Plain PyTorch, exact for float64 inputs. Sums over a token's choices are float32, the products'
results have the inputs' dtype, as in transformers' modules.

The products' rows have two forms. Sorted: a row for each slot, by expert; reads the index. Dense: a
row for each expert and token, for function transforms and traces.
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
    hidden, top_k_index, top_k_weights, gate_up, down, gate_up_bias=None, down_bias=None,
    activation="silu", gated=True, interleaved=False, transposed=False, limit=None, alpha=1.0,
    up_offset=0.0, dense=False, compute=None,
):  # fmt: skip
    experts = (gate_up if isinstance(gate_up, Tensor) else gate_up.qweight).shape[0]
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = (_Dense if dense else _Sorted)(top_k_index, experts)
    z = rows.product(rows.gather(hidden), gate_up, gate_up_bias, compute)
    h = gate_reference(z, activation, gated, interleaved, limit, alpha, up_offset)
    o = rows.product(h, down, down_bias, compute)
    weights = rows.weights(top_k_weights.to(wide))
    return rows.sum_by_token(o.to(wide) * weights).to(hidden.dtype)


def quantized_experts_reference(
    hidden, index, slots, w1, s1, z1, w2, s2, z2, b1, b2, format, inner, group1, group2,
    compute=None, activation="silu", gated=True, interleaved=False, transposed=False, limit=None,
    alpha=1.0, up_offset=0.0, dense=False,
):  # fmt: skip
    """The operator's arguments: gate_up's tensors are w1, s1 and z1, down's w2, s2 and z2."""
    wide = 2 * inner if gated else inner
    first = _Codes(format, wide, hidden.shape[1], group1, w1, s1, z1)
    second = _Codes(format, hidden.shape[1], inner, group2, w2, s2, z2)
    gate = activation, gated, interleaved, transposed, limit, alpha, up_offset
    return experts_reference(
        hidden, index, slots, first, second, b1, b2, *gate, dense=dense, compute=compute
    )


class _Codes(NamedTuple):
    """What a QuantizedWeight of `quantize_experts` has."""

    format: str
    out_features: int
    in_features: int
    group_size: int
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None


class _Sorted:
    """A row for each slot whose index is an expert, sorted by expert."""

    def __init__(self, index, experts):
        slots = index.flatten()
        self.counts = torch.bincount(slots, minlength=experts + 1)[:experts].tolist()
        self.order = slots.argsort(stable=True)[: sum(self.counts)]
        self.shape = index.shape

    def gather(self, hidden):
        return hidden.repeat_interleave(self.shape[1], 0).index_select(0, self.order)

    def weights(self, slots):
        return slots.flatten().index_select(0, self.order)[:, None]

    def product(self, rows, weight, bias, compute):
        """Runs the experts that have rows; without rows the first, for the autograd graph."""
        matmuls = _matmuls(weight, bias, compute)
        if not matmuls:
            outputs = weight.shape[1] if isinstance(weight, Tensor) else weight.out_features
            return rows.new_zeros(0, outputs)
        parts = rows.split(self.counts)
        chosen = [e for e, count in enumerate(self.counts) if count] or [0]
        return torch.cat([matmuls[e](parts[e]) for e in chosen])

    def sum_by_token(self, rows):
        slots = rows.new_zeros(self.shape.numel(), rows.shape[1]).index_copy(0, self.order, rows)
        return slots.view(*self.shape, rows.shape[1]).sum(1)


class _Dense:
    """A row for each expert and token, of zeros if the token did not choose the expert.

    NaNs in an expert's weights reach neither those tokens nor, by autograd, their gradients.
    """

    def __init__(self, index, experts):
        self.hits = index == torch.arange(experts, device=index.device)[:, None, None]
        self.hit = self.hits.any(-1, keepdim=True)  # [E, tokens, 1]; hits: [E, tokens, k]

    def gather(self, hidden):
        return torch.where(self.hit, hidden, 0.0)

    def weights(self, slots):
        return torch.where(self.hits, slots, 0.0).sum(-1, keepdim=True)

    def product(self, rows, weight, bias, compute):
        if isinstance(weight, Tensor):  # one matmul, and any number of experts
            y = rows @ weight.transpose(1, 2)
            y = y if bias is None else y + bias.unsqueeze(1)
        else:
            matmuls = _matmuls(weight, bias, compute)
            y = torch.stack([run(part) for run, part in zip(matmuls, rows.unbind(), strict=True)])
        return torch.where(self.hit, y, 0.0)

    def sum_by_token(self, rows):
        return rows.sum(0)


def _matmuls(weight, bias, compute):
    """Each expert's matmul. Uses unbind: the gradient of weight[e] is as large as weight."""
    if isinstance(weight, Tensor):
        each = [partial(F.linear, weight=w) for w in weight.unbind()]
    else:
        layout = {"format": weight.format, "group_size": weight.group_size, "compute": compute}
        layout |= {"out_features": weight.out_features, "in_features": weight.in_features}
        zeros = [None] * len(weight.qweight) if weight.zeros is None else weight.zeros
        each = [
            partial(quantized_linear_reference, qweight=q, scales=s, zeros=z, **layout)
            for q, s, z in zip(weight.qweight, weight.scales, zeros, strict=True)
        ]
    biases = [None] * len(each) if bias is None else bias.unbind()
    return [partial(matmul, bias=b) for matmul, b in zip(each, biases, strict=True)]


def gate_reference(z, activation, gated, interleaved, limit, alpha, up_offset):
    act = ACTIVATIONS[None if activation == "none" else activation]
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
