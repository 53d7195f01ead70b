"""swiglu and geglu, the gated activations of transformers' MLPs, with their references.

Both multiply an activation of the gate by the up projection: Shazeer, arXiv:2002.05202. Each is one
operator with one pass over memory forward and one backward. The backward recomputes the activation
instead of storing it.
"""

import math
from typing import overload

import torch
from torch import Tensor

from fusedops.exporting import exports_onnx
from fusedops.extension import _C, traced
from fusedops.functional.jagged import operator
from fusedops.functional.quantized_rows import (
    QuantizedRows,
    check_is_name,
    quantized_rows_reference,
)

__all__ = ["geglu", "swiglu"]


@overload
def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    output_format: None = None,
) -> Tensor: ...
@overload
def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    output_format: str,
) -> QuantizedRows: ...
def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    output_format: str | None = None,
) -> Tensor | QuantizedRows:
    """`F.silu(gate) * up` in one pass over memory, and gpt-oss's variant.

        g = min(gate, limit), u = clamp(up, -limit, limit)      without a limit: gate and up
        y = g * sigmoid(alpha * g) * (u + up_offset)

    gate, up: the same shape, float32, float16, bfloat16 or float64, any strides. Without up, gate
    is packed: [..., 2 n], with gate and up side by side in the last dimension. It is read in place,
    and its gradient is packed too. gpt-oss uses limit=7.0, alpha=1.702, up_offset=1.0. Returns y,
    [...] or [..., n], contiguous, in the dtype that gate and up promote to. Computed in float32
    (float64 for float64) and rounded once.

    output_format: "int8" or "fp8" returns (codes, scale) instead, which `quantized_linear` takes:
    each row of y, still in float32, quantized as `input_format` does there. codes: int8 or
    float8_e4m3fn, y's shape; scale: float32, [..., 1]. Codes have no gradient.

    Raises RuntimeError if a shape or dtype does not fit or if codes would need a gradient, and
    ValueError for a negative limit or an unknown output_format. Shazeer, arXiv:2002.05202; gpt-oss,
    arXiv:2508.10925.
    """
    if output_format is not None:
        check_is_name("swiglu", output_format)
        name, options = "swiglu_quantized", {"alpha": alpha, "up_offset": up_offset}
        op = operator(name, gate, up) if traced(gate, up) else _C.swiglu_quantized
        return op(gate, up, limit=limit, **options, output_format=output_format)
    op = operator("swiglu", gate, up) if traced(gate, up) else _C.swiglu
    return op(gate, up, limit=limit, alpha=alpha, up_offset=up_offset)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """`F.gelu(gate, approximate=approximate) * up` in one pass over memory.

        y = gate * P(X <= gate) * up      X standard normal; approximate="tanh": torch's formula

    Shapes, dtypes and the packed form are `swiglu`'s. Raises RuntimeError if a shape or dtype does
    not fit, and ValueError for an unknown `approximate`. Shazeer, arXiv:2002.05202.
    """
    op = operator("geglu", gate, up) if traced(gate, up) else _C.geglu
    return op(gate, up, approximate=approximate)


# References: plain PyTorch in float32 (float64 for float64), rounded to the result's dtype.


def swiglu_reference(
    gate, up=None, *, limit=None, alpha=1.0, up_offset=0.0, output_format=None
):  # fmt: skip
    g, u, dtype = _operands(gate, up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    y = g * torch.sigmoid(alpha * g) * (u + up_offset)
    return y.to(dtype) if output_format is None else quantized_rows_reference(y, output_format)


def swiglu_quantized_reference(*args, output_format="int8", **options):
    return swiglu_reference(*args, output_format=output_format, **options)


def geglu_reference(gate, up=None, *, approximate="none"):
    g, u, dtype = _operands(gate, up)
    if approximate == "tanh":  # torch's (1 + tanh(w)) / 2 without its cancellation
        p = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    elif exports_onnx():  # ONNX has no erfc
        p = (torch.erf(g / math.sqrt(2)) + 1) / 2
    else:
        p = torch.erfc(-g / math.sqrt(2)) / 2
    return (g * p * u).to(dtype)


def _operands(gate, up):
    """gate and up in float32 (float64), and y's dtype."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return gate.to(wide), up.to(wide), dtype
