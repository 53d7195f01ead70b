"""Triton experts' backward: gradients of hidden states, routing weights, expert weights, biases.

It recomputes the activation's output from z, the first matmul's output, instead of storing it.
"""

from typing import Any

import torch
from torch import Tensor

from fusedops.triton.experts.forward import as_rows, contiguous, has_kernel, upright
from fusedops.triton.experts.products import outer, product, sums_of_rows
from fusedops.triton.experts.routing import Routing
from fusedops.triton.experts.rows import Gate, gate_backward, sum_slots
from fusedops.triton.tile import composite, outputs_of

__all__ = ["experts_backward", "quantized_experts_backward"]


def experts_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """fusedops::experts_backward; see csrc/ops/experts/operators.h. Returns six gradients."""
    operator = torch.ops.fusedops.experts_backward.default
    dy, hidden, index, weights, gate_up, down, _, second_bias, *options, z, _ = arguments
    if not has_kernel(hidden, index, gate_up):
        return composite(operator, *arguments)
    outputs = outputs_of(operator, *arguments)
    dhidden, dweights, dgate_up, ddown, dfirst_bias, dsecond_bias = outputs
    activation, gated, interleaved, transposed, *numbers = options
    gate = Gate(activation, gated, interleaved, *numbers)
    with torch.accelerator.device_index(hidden.device.index):
        routing = Routing.of(index, weights, len(gate_up))
        first, second = (upright(w, transposed) for w in (gate_up, down))
        rows, n = routing.rows, second.shape[2]
        dy, of_rows = as_rows(dy), routing.of_rows(routing.weights)
        dh = hidden.new_empty((rows, n), dtype=torch.float32)  # before the routing weight
        product(routing, dy, second.transpose(1, 2), None, dh, gathers=True)
        h: Any = hidden.new_empty(rows, n) if ddown is not None else None  # weighted
        through_z = any(t is not None for t in (dhidden, dgate_up, dfirst_bias))
        dz: Any = hidden.new_empty(rows, first.shape[1]) if through_z else None
        dots: Any = dh.new_empty(rows) if dweights is not None else None
        gate_backward(z.contiguous(), dh, of_rows, h, dz, dots, gate)
        if dhidden is not None:
            sums = dh.new_empty(rows, hidden.shape[1])
            product(routing, dz, first.transpose(1, 2), None, sums)
            sum_slots(routing, sums, None, None, dhidden)
        if dweights is not None:
            dweights.copy_(gradient_of_weights(routing, dots, dy, contiguous(second_bias)))
        if dgate_up is not None:
            outer(routing, dz, as_rows(hidden), upright(dgate_up, transposed), gathers=True)
        if ddown is not None or dsecond_bias is not None:
            gathered = dy[routing.order // routing.choices]
            if ddown is not None:
                outer(routing, gathered, h, upright(ddown, transposed))
            if dsecond_bias is not None:
                sums_of_rows(routing, gathered, of_rows, dsecond_bias)
        if dfirst_bias is not None:
            sums_of_rows(routing, dz, None, dfirst_bias)
    return outputs


def gradient_of_weights(routing: Routing, dots: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    """[tokens, choices]: a row's dot, plus dy times the expert's bias; 0 without an expert."""
    found = dots[routing.places].view(routing.index.shape)
    if bias is not None:
        of_experts = bias.float()[routing.index.clamp(0, routing.experts - 1)]
        found = found + (of_experts * dy.float().unsqueeze(1)).sum(-1)
    live = (routing.index >= 0) & (routing.index < routing.experts)
    return torch.where(live, found, 0.0)


def quantized_experts_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """fusedops::quantized_experts_backward, by ATen calls: it has no kernel of its own yet."""
    return composite(torch.ops.fusedops.quantized_experts_backward.default, *arguments)
