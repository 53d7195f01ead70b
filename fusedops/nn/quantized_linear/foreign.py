"""Converts bitsandbytes' nf4 weights in a state dict, and detects GPTQ's and AWQ's."""

import json
from typing import Any

from torch import Tensor

from fusedops.functional.quantized_linear import NF4_BLOCK

__all__ = ["LOADS", "take_bitsandbytes", "take_zeros"]

LOADS = "float weights, fusedops' own codes, or bitsandbytes' nf4 whose absmax are floats"
QUANT_STATE = "quant_state.bitsandbytes__nf4"


def take_bitsandbytes(state_dict: dict[str, Any], name: str) -> list[int]:
    """Renames a Linear4bit's entries to ours; returns its weight's shape, or [] if they stay.

    They stay if the blocks have another size than ours or the absmax are quantized too.
    """
    if not {f"{name}.absmax", f"{name}.quant_map", f"{name}.{QUANT_STATE}"} <= state_dict.keys():
        return []
    state = json.loads(bytes(state_dict[f"{name}.{QUANT_STATE}"].tolist()))
    if not state_dict[f"{name}.absmax"].is_floating_point() or state["blocksize"] != NF4_BLOCK:
        return []
    prefix = name.removesuffix("weight")
    state_dict[f"{prefix}qweight"] = state_dict.pop(name)
    state_dict[f"{prefix}absmax"] = state_dict.pop(f"{name}.absmax")
    for part in (QUANT_STATE, "quant_map"):
        del state_dict[f"{name}.{part}"]
    return state["shape"]


def take_zeros(state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Removes a GPTQ or AWQ checkpoint's qzeros and g_idx; returns whether any were present."""
    found = [state_dict.pop(f"{prefix}{name}", None) for name in ("qzeros", "g_idx")]
    return any(t is not None for t in found)
