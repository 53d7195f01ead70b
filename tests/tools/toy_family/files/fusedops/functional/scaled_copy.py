"""scaled_copy, a tensor times a number."""

from torch import Tensor

from fusedops.extension import _C, ops, traced

__all__ = ["scaled_copy"]


def scaled_copy(x: Tensor, scale: float = 1.0) -> Tensor:
    """`scale * x` in one pass over memory.

    x: float32, float16, bfloat16 or float64, any strides. Returns y [x's shape], contiguous.
    Computed in float32 (float64 for float64) and rounded once. Raises RuntimeError if x has another
    dtype.
    """
    return (ops.scaled_copy if traced(x) else _C.scaled_copy)(x, scale)
