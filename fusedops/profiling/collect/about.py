"""Describes the machine, the model and the optimizer's state for a report."""

import itertools
from typing import Any

import torch
from torch import nn

from fusedops.backends import version_of
from fusedops.measuring.changes import frozen_linears
from fusedops.measuring.environment import versions
from fusedops.profiling.collect.forwards import class_name
from fusedops.profiling.planning.step import blocks

__all__ = ["about", "devices_of"]

BLOCKED = 4096  # elements from which AdamW8bit has 8-bit moments


def about(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """What a report says of the machine, the versions, the model and the optimizer's state."""
    description: dict[str, Any] = versions() | {"fusedops": version_of("fusedops")}
    if model is not None:
        parameters = list(model.parameters())
        frozen = [linear.weight for linear in dict.fromkeys(frozen_linears(model).values())]
        description |= {
            "parameter_bytes": sum(p.nbytes for p in parameters),
            "frozen_bytes": sum(p.nbytes for p in frozen),
            "frozen_elements": sum(p.numel() for p in frozen),
            "model": class_name(model),
            "parameters": sum(p.numel() for p in parameters),
            "dtype": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
            "blocks": len(blocks(model)),
            "checkpointing": _checkpointing(model),
            "sharded": _sharded(model),
        }
    if isinstance(optimizer, torch.optim.AdamW):
        state = {p: values for p, values in optimizer.state.items() if p.numel() >= BLOCKED}
        tensors = [t for values in state.values() for t in values.values()]
        description |= {
            "adamw_elements": sum(p.numel() for p in state),
            "adamw_bytes": sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)),
        }
    return description


def _checkpointing(model: nn.Module) -> str:
    """The method of transformers that checkpoints all blocks; empty without one."""
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    supported = getattr(model, "supports_gradient_checkpointing", False)
    return next((name for name in names if supported and hasattr(model, name)), "")


def _sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the parameters: DTensors, or those of the first FSDP."""
    names = {type(module).__name__ for module in model.modules()}
    sharded = any(hasattr(p, "_local_tensor") for p in model.parameters())
    return sharded or "FullyShardedDataParallel" in names


def devices_of(model: nn.Module | None) -> set[str]:
    """Types of the devices that hold a model's parameters and buffers."""
    if model is None:
        return set()
    return {t.device.type for t in itertools.chain(model.parameters(), model.buffers())}
