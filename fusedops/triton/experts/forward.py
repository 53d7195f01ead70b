"""Triton experts' forward: two grouped matmuls with the activation between them."""

from typing import Any

import torch
from torch import Tensor

from fusedops.triton.experts.products import product
from fusedops.triton.experts.routing import Routing
from fusedops.triton.experts.rows import Gate, gate, sum_slots
from fusedops.triton.tile import composite, outputs_of

__all__ = ["experts_forward", "quantized_experts_forward", "upright"]


def experts_forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """fusedops::experts_forward; see csrc/ops/experts/operators.h. Returns (y, z)."""
    operator = torch.ops.fusedops.experts_forward.default
    hidden, index, weights, gate_up, down, first_bias, second_bias, *rest, keep_z = arguments
    if not has_kernel(hidden, index, gate_up):
        return composite(operator, *arguments)
    y, z = outputs_of(operator, *arguments)
    activation, gated, interleaved, transposed, *numbers = rest
    options = Gate(activation, gated, interleaved, *numbers)
    with torch.accelerator.device_index(hidden.device.index):
        routing = Routing.of(index, weights, len(gate_up))
        first, second = (upright(w, transposed) for w in (gate_up, down))
        z = hidden.new_empty(routing.rows, first.shape[1]) if z is None else z
        product(routing, as_rows(hidden), first, contiguous(first_bias), z, gathers=True)
        h = hidden.new_empty(routing.rows, second.shape[2])
        gate(z, h, options)
        sums = hidden.new_empty((routing.rows, second.shape[1]), dtype=torch.float32)
        product(routing, h, second, None, sums)
        sum_slots(routing, sums, routing.weights, contiguous(second_bias), y)
    return y, z if keep_z else None


def has_kernel(hidden: Tensor, index: Tensor, gate_up: Tensor) -> bool:
    return hidden.dtype != torch.float64 and 0 not in (
        hidden.numel(),
        index.numel(),
        gate_up.numel(),
    )


def quantized_experts_forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """fusedops::quantized_experts_forward, by ATen calls: it has no kernel of its own yet."""
    return composite(torch.ops.fusedops.quantized_experts_forward.default, *arguments)


def upright(weight: Tensor, transposed: bool) -> Tensor:
    """[E, outputs, inputs]"""
    return weight.transpose(1, 2) if transposed else weight


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def as_rows(t: Tensor) -> Tensor:
    """With contiguous rows."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()
