"""Lets PEFT's modules_to_save train modules that `quantize` changed.

PEFT trains a copy of the module, and a copy of codes has no weight to train. This file gives such a
copy its weight in floats. fusedops imports it after peft.utils.other.
"""

import functools
from typing import Any

import torch
from peft.utils import other

from fusedops.integrations.transformers.quantization import in_floats
from fusedops.nn import QuantizedExperts, QuantizedLinear

__all__: list[str] = []

ModulesToSaveWrapper: Any = other.ModulesToSaveWrapper
update_with_a_copy = ModulesToSaveWrapper.update


@functools.wraps(update_with_a_copy)
def update(wrapper, adapter_name, *args, **kwargs):
    """PEFT's update, whose new copy is in floats. Raises ValueError for quantized experts."""
    for path, module in wrapper.original_module.named_modules():
        if isinstance(module, QuantizedExperts):
            raise ValueError(
                f"modules_to_save: {path or 'the module'} is a QuantizedExperts, whose codes "
                "cannot be trained. Pass its name to quantize's skip"
            )
    update_with_a_copy(wrapper, adapter_name, *args, **kwargs)
    _to_floats(wrapper.modules_to_save, adapter_name)


def _to_floats(parent: torch.nn.Module, name: str) -> None:
    """Replaces the quantized layers in a child by layers of floats. PEFT decides what trains."""
    child = parent.get_submodule(name)
    if isinstance(child, QuantizedLinear):
        setattr(parent, name, in_floats(child, child.dtype))
        return
    for inner, _ in [*child.named_children()]:
        _to_floats(child, inner)


ModulesToSaveWrapper.update = update
