"""swiglu and geglu, the gated activations of transformers' MLPs.

Both multiply an activation of the gate by the up projection: Shazeer, arXiv:2002.05202. Each is one
operator with one pass over memory forward and one backward. The backward recomputes the activation
instead of storing it.
"""

from typing import overload

from torch import Tensor

from fusedops.extension import _C, traced
from fusedops.functional.jagged import operator
from fusedops.functional.quantized_rows import QuantizedRows, check_is_name

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
