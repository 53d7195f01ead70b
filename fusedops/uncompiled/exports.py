"""The functions of fusedops._C in plain Python, as csrc/python/python.cpp exports them."""

import importlib

import torch

from fusedops.uncompiled.library import reference, short_path
from fusedops.uncompiled.norm import norm_backward_outputs, norm_outputs
from fusedops.uncompiled.optimizer import AdamWBucket, any_gradient, same_objects
from fusedops.uncompiled.plans import (
    most_integers,
    quantized_linear_gpu_plan,
    quantized_linear_plan,
    quantized_linear_way,
)

__all__ = [
    "AdamWBucket",
    "add_layer_norm",
    "add_rms_norm",
    "any_gradient",
    "attention",
    "bfloat16_products",
    "cpu_isa",
    "cross_entropy",
    "geglu",
    "layer_norm",
    "linear",
    "linear_always",
    "linear_cross_entropy",
    "most_integers",
    "nf4_table",
    "norm_backward_outputs",
    "norm_outputs",
    "own_product_pays",
    "quantized_linear",
    "quantized_linear_gpu_plan",
    "quantized_linear_plan",
    "quantized_linear_way",
    "rms_norm",
    "rotary_embedding",
    "same_objects",
    "swiglu",
]

for family in (
    "adamw",
    "attention",
    "cross_entropy",
    "gated_activation",
    "linear",
    "norm",
    "quantized_linear",
    "rotary",
):
    importlib.import_module(f"fusedops.uncompiled.{family}")

layer_norm = short_path("layer_norm")
rms_norm = short_path("rms_norm")
add_layer_norm = short_path("add_layer_norm")
add_rms_norm = short_path("add_rms_norm")
swiglu = short_path("swiglu")
geglu = short_path("geglu")
linear = short_path("linear")
quantized_linear = short_path("quantized_linear")
rotary_embedding = short_path("rotary_embedding")
cross_entropy = short_path("cross_entropy")
linear_cross_entropy = short_path("linear_cross_entropy")
attention = short_path("attention")


def cpu_isa() -> str:
    """The instruction set of the CPU kernels."""
    return "none"


def linear_always(asked: bool) -> None:
    """Sets whether `linear` runs its kernel at any size; there is none here."""


def own_product_pays(dtype: torch.dtype, rows: int, columns: int, depth: int, across: bool) -> bool:
    """Whether our own matmul is faster than torch's; there is none here."""
    return False


def bfloat16_products(asked: bool | None) -> None:
    """Whether kernels multiply in bfloat16; there are no kernels here."""


def nf4_table() -> list[float]:
    return list(reference("quantized_linear", "NF4"))
