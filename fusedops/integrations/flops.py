"""Registers the operators' FLOP formulas, from fusedops/costs, with torch's flop counter.

Imported after torch.utils.flop_counter (see AFTER_IMPORT), so FlopCounterMode and every tool that
reads its table count our operators. The conventions are torch's:

- A product [m, k] x [k, n] is 2 m n k. What a kernel computes twice where separate operators
  compute it once (the logits of linear_cross_entropy) is counted once.
- Elementwise and row-wise operators have no formula, so they count as 0 (norms, activations, rotary
  embeddings, cross_entropy, AdamW, quantize_weight and dequantize_weight).
- Attention counts every query with every key of its sequence, whatever causal, window and masks
  hide, and counts each query head of grouped heads. Its backward counts as the backward that torch
  would run for the call: fused kernels compute the scores a second time, separate operators do not.

torch up to 2.13 has no formula for its own fused attention on CPUs; later versions have one. It is
added here: otherwise a model's attention would count after patch but not before.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fusedops.backends import FAMILIES
from fusedops.extension import UNCOMPILED

__all__: list[str] = []


def _register(name: str, formula: Callable[..., int]) -> None:
    """formula: takes the operator's arguments by their names in its schema."""
    library, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, library), operator)
    names = [argument.name for argument in packet.default._schema.arguments]

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(**dict(zip(names, args, strict=False)), **kwargs)

    if packet not in flop_registry:  # torch raises for a second formula
        register_flop_formula(packet, get_raw=True)(count)


for _family in FAMILIES:
    _costs = importlib.import_module(f"fusedops.costs.{_family}")
    for _name, _formula in getattr(_costs, "FLOPS", {}).items():
        if not (UNCOMPILED and _name.startswith("fusedops::")):
            _register(_name, _formula)
