"""Converts transformers' experts modules to QuantizedExperts."""

from dataclasses import asdict
from typing import Any

from fusedops.nn import QuantizedExperts
from fusedops.patching.models.experts.gate import Gate
from fusedops.patching.models.experts.site import (
    REPLACED,
    gate_or_reason,
    is_experts,
    stand_in,
    why_unlike,
)

__all__ = ["gate_for_codes", "is_experts", "quantized_experts"]


def gate_for_codes(module: Any, options: dict[str, Any]) -> Gate | str:
    """The gate of an experts module, which may be on meta, or why it stays in floats."""
    if options["input_format"] is not None:
        return "quantized experts take no input_format"
    if module.has_post_expert_norm:
        return "it normalises each expert's result"
    if "forward" in vars(module):
        return REPLACED
    return why_unlike(module) or gate_or_reason(module, stand_in(module))


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
