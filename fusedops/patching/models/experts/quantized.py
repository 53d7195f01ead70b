"""Makes QuantizedExperts of transformers' experts modules, for `fusedops.quantize`."""

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.nn import QuantizedExperts
from fusedops.patching.core.probing import bare, drawn
from fusedops.patching.models.experts.gate import Gate
from fusedops.patching.models.experts.site import gate_or_reason, is_experts, why_unlike

__all__ = ["gate_for_codes", "is_experts", "quantized_experts"]


def gate_for_codes(module: Any, options: dict[str, Any]) -> Gate | str:
    """The gate of an experts module, which may be on meta, or why it stays in floats."""
    if options["input_format"] is not None:
        return "quantized experts take no input_format"
    return why_unlike(module) or gate_or_reason(module, _stand_in(module))


def quantized_experts(
    module: Any, gate: Gate, format: str, options: dict[str, Any]
) -> QuantizedExperts:
    """The module with its weights quantized; it shares the biases. On meta, codes are empty."""
    first = getattr(module, _first(module))
    transposed = module.is_transposed
    new = QuantizedExperts(
        first.shape[0],
        first.shape[1 if transposed else 2],
        module.down_proj.shape[1 if transposed else 2],
        format=format,
        **{name: options[name] for name in ("group_size", "scale", "compute")},
        **asdict(gate),
        transposed=transposed,
        device="meta",
    )
    for name, stack in new.stacks().items():
        weight = getattr(module, name)
        if not weight.is_meta:
            stack.take(stack.quantized(weight.detach()))
        if module.has_bias:
            setattr(new, f"{name}_bias", getattr(module, f"{name}_bias"))
    return new.train(module.training)


def _first(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _stand_in(module: Any) -> nn.Module:
    """A copy with random weights in the memory of one expert: each begins one element later."""
    twin, draw = bare(module), torch.Generator().manual_seed(0)
    twin._parameters = {
        name: None if p is None else nn.Parameter(_random(draw, p), requires_grad=False)
        for name, p in module._parameters.items()
    }
    return twin


def _random(draw: torch.Generator, like: Tensor) -> Tensor:
    experts, *shape = like.shape
    of_one = math.prod(shape)
    numbers = drawn(draw, of_one + experts) * like.shape[-1] ** -0.5
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return numbers.as_strided((experts, *shape), (1, *strides))
