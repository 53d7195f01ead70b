"""Registers fusedops' `experts` with transformers, and decides in each call whether it runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.functional.experts import experts
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.config import NAME, experts_implementation, gate_of
from fusedops.patching.core.source import innermost
from fusedops.patching.core.swap import original_class
from fusedops.patching.models.experts.gate import Gate

__all__ = ["experts_forward", "fused_experts", "register_experts"]


def register_experts() -> None:
    """Registers the experts implementation "fusedops" with transformers. `patch` calls this."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' grouped_mm_experts_forward by `experts`, for modules that patch has fused.

    hidden_states: [tokens, H]. top_k_index, top_k_weights: [tokens, k]. Returns [tokens, H] in
    hidden_states' dtype. Calls that `experts` does not take go to the implementation that the
    config names.
    """
    if _why_theirs(module, hidden_states, top_k_index, top_k_weights):
        return _theirs(module, hidden_states, top_k_index, top_k_weights)
    return fused_experts(module, gate_of(module), hidden_states, top_k_index, top_k_weights)


def fused_experts(
    module: Any, gate: Gate, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs the module's call by `experts`, with this gate."""
    if module.has_post_expert_norm:
        return _normalised(module, gate, hidden_states, top_k_index, top_k_weights)
    return _summed(module, gate, hidden_states, top_k_index, top_k_weights)


def _normalised(
    module: Any, gate: Gate, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Normalises each choice's result before the weighted sum: each choice runs as a token."""
    tokens, choices = top_k_index.shape
    rows, index = hidden_states.repeat_interleave(choices, 0), top_k_index.reshape(-1, 1)
    results = _summed(module, gate, rows, index, torch.ones_like(index, dtype=rows.dtype))
    wide = torch.promote_types(rows.dtype, torch.float32)
    weighted = module.post_expert_norm(results).to(wide) * top_k_weights.reshape(-1, 1).to(wide)
    live = index < module.down_proj.shape[0]  # other choices name no expert
    y = torch.where(live, weighted, 0.0).view(tokens, choices, -1).sum(1)
    return y.to(hidden_states.dtype)


def _summed(
    module: Any, gate: Gate, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    y = experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        getattr(module, first),
        module.down_proj,
        gate_up_bias=getattr(module, f"{first}_bias") if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        transposed=module.is_transposed,
        activation=gate.activation,
        gated=gate.gated,
        interleaved=gate.interleaved,
        limit=gate.limit,
        alpha=gate.alpha,
        up_offset=gate.up_offset,
    )
    return y.to(hidden_states.dtype)  # another one under autocast


def _why_theirs(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> str:
    """Why transformers' function runs; empty if `experts` does."""
    if gate_of(module) is None:
        return "patch did not fuse the module"
    device = hidden_states.device.type
    if device not in ("cpu", "meta"):
        return f"there is no kernel for {device}"
    if hidden_states.dim() != 2 or top_k_index.dtype != torch.int64:
        return "hidden_states is not [tokens, H], or the index is not int64"
    if hidden_states.dtype != module.down_proj.dtype and not torch.is_autocast_enabled(device):
        return "the dtypes differ"
    return ""


def _theirs(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs the function that the model would have run."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    was = experts_implementation(module.config)
    eager: Callable = innermost(original_class(module))
    table: Any = ALL_EXPERTS_FUNCTIONS
    run = table["grouped_mm"] if was == NAME else table.get_interface(was, eager)
    return run(module, hidden_states, top_k_index, top_k_weights)


decides(
    experts_forward,
    "experts",
    at=lambda module, *args, **kwargs: module,
    why=_why_theirs,
    repeat=lambda *args, **kwargs: Repeat(experts_forward, _theirs, args, kwargs),
)
