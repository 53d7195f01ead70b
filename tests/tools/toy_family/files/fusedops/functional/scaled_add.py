"""scaled_add, a sum with a scaled residual, with its reference."""

import torch
from torch import Tensor

from fusedops.extension import _C, traced
from fusedops.functional.traffic import Formula, once

__all__ = ["scaled_add"]


def scaled_add(x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
    """`torch.add(x, residual, alpha=scale)` in one pass over memory.

        y = x + scale * residual

    x, residual: one shape and dtype, float32, float16, bfloat16 or float64, any strides. Returns y
    [x's shape], contiguous. Computed in float32 (float64 for float64) and rounded once. Raises
    RuntimeError if a shape or dtype does not fit.
    """
    run = torch.ops.fusedops.scaled_add if traced(x, residual) else _C.scaled_add
    return run(x, residual, scale)


TRAFFIC: dict[str, Formula] = {"scaled_add_forward": once, "scaled_add_backward": once}


# Reference: plain PyTorch in the input's dtype, exact for float64 inputs.


def scaled_add_reference(x, residual, scale=1.0):
    return x + scale * residual
