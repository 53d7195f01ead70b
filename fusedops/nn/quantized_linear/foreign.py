"""Recognises other packages' modules and state dicts, without importing the packages.

It converts bitsandbytes' nf4 weights, detects GPTQ's and AWQ's, finds transformers' Conv1D, and
tells PEFT's adapters from the modules that they wrap.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fusedops.references.quantized_linear import NF4_BLOCK

__all__ = [
    "LOADS",
    "conv1d",
    "is_adapter",
    "path_without",
    "set_orientation",
    "take_bitsandbytes",
    "take_zeros",
    "unwrapped",
    "why_float",
]

LOADS = "float weights, fusedops' own codes, or bitsandbytes' nf4 whose absmax are floats"
QUANT_STATE = "quant_state.bitsandbytes__nf4"

# A PEFT module's children that are the model's own. All others are adapters, trained copies
# (modules_to_save) or encoders of prompts.
WRAPPED = ("base_model", "model", "lora_model", "base_layer", "original_module")

# Layers that compute with the wrapped module's float weight, by class name.
READERS = {
    "ParamWrapper": "PEFT's target_parameters adapt its float weight",
    "GloraLayer": "its GLoRA adapter computes with its float weight",
}


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
    removed = [state_dict.pop(f"{prefix}{name}", None) for name in ("qzeros", "g_idx")]
    return any(t is not None for t in removed)


def conv1d() -> tuple[type[nn.Module], ...]:
    """transformers' Conv1D, a linear whose weight is [in, out]; nothing if it is not imported."""
    cls = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if cls is None else (cls,)


def _steps(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str]]:
    """Each module on the way to a path, and the name of its child there."""
    module: Any = model
    for name in path.split("."):
        yield module, name
        module = module._modules[name]


def _names(module: nn.Module) -> set[str]:
    """The names of a module's classes that PEFT defines."""
    classes = type(module).__mro__
    return {cls.__name__ for cls in classes if cls.__module__.partition(".")[0] == "peft"}


def is_adapter(model: nn.Module, path: str) -> bool:
    """Whether the module at a path is not the model's own, but PEFT's."""
    return any(name not in WRAPPED and _names(module) for module, name in _steps(model, path))


def path_without(model: nn.Module, path: str) -> str:
    """The path that the module has in the model without PEFT."""
    return ".".join(name for module, name in _steps(model, path) if not _names(module))


def unwrapped(module: nn.Module | None) -> nn.Module | None:
    """The module that PEFT's layers wrap, or the module itself."""
    while module is not None and _names(module):
        wrapped = [module._modules[name] for name in WRAPPED if name in module._modules]
        if not wrapped:
            break
        module = wrapped[0]
    return module


def why_float(model: nn.Module, path: str) -> str:
    """Why adapters around the module need its weight in floats; empty if they do not."""
    names = {name for module, _ in _steps(model, path) for name in _names(module)}
    return next((why for name, why in READERS.items() if name in names), "")


def set_orientation(model: nn.Module, path: str, transposed: bool) -> None:
    """Tells the adapters around a linear whether its weight is [in, out], as Conv1D's."""
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
        layer = model.get_submodule(path)
        if not _names(layer):
            return
        adapters = (m for name, m in layer.named_children() if name != "base_layer")
        for module in (layer, *(m for adapter in adapters for m in adapter.modules())):
            if "fan_in_fan_out" in vars(module):
                vars(module)["fan_in_fan_out"] = transposed
