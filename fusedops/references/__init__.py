"""Definitions: one file per family, its formulas in plain PyTorch.

`register` gives the operators of csrc/ops their definitions, "fusedops::X_reference". They are
imported at their first call.
"""

import functools
import importlib
from collections.abc import Callable

import torch

__all__ = ["later", "register"]

# Each family's definitions that csrc/ops declares.
REFERENCES = {
    "attention": ("attention_forward_reference", "cached_attention_forward_reference"),
    "cross_entropy": (
        "cross_entropy_reference",
        "linear_cross_entropy_reference",
        "cross_entropy_sums_reference",
        "linear_log_probs_reference",
    ),
    "experts": ("experts_reference", "quantized_experts_reference"),
    "gated_activation": ("gated_activation_reference", "gated_activation_quantized_reference"),
    "norm": ("norm_reference", "norm_quantized_reference"),
    "quantized_linear": ("quantized_linear_reference", "dequantize_weight_reference"),
    "rotary": ("rotary_reference",),
}

# A definition stands for PyTorch's operators, under vmap and in an ONNX export's trace too.
KEYS = ("CompositeImplicitAutograd", "FuncTorchBatched", "Tracer")


def register() -> torch.library.Library:
    """Registers the definitions of what csrc/ops declares; the returned library keeps them."""
    library = torch.library.Library("fusedops", "IMPL")
    declared = {name.removeprefix("fusedops::") for name in torch._C._dispatch_get_all_op_names()}
    for family, names in REFERENCES.items():
        for name in declared.intersection(names):
            for key in KEYS:
                library.impl(name, later(family, name), key)
    if "norm_reference" in declared:
        mask = later("norm", "dropout_mask_reference")
        library.impl("dropout_mask", mask, "CompositeExplicitAutograd")
    return library


def later(family: str, name: str) -> Callable:
    """A function of a family's file, which is imported at the first call."""

    @functools.cache
    def definition():
        return getattr(importlib.import_module(f"fusedops.references.{family}"), name)

    return lambda *args, **kwargs: definition()(*args, **kwargs)
