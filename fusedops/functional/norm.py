"""layer_norm, rms_norm and their residual-sum variants.

Every function is one operator: C++ on CPUs, Triton (or CUDA C++) on GPUs, differentiable ATen calls
elsewhere. fusedops/references/norm.py defines the results.
"""

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from fusedops.extension import _C, traced
from fusedops.functional.jagged import operator
from fusedops.functional.quantized_rows import QuantizedRows, check_is_name
from fusedops.functional.sharded import sharded_call

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm` in one pass over memory, forward and backward.

        y = (input - mean(input)) / sqrt(var(input) + eps) * weight + bias      biased variance

    input: [..., *normalized_shape], float32, float16, bfloat16 or float64, any strides. weight,
    bias: normalized_shape, any of these dtypes. Returns y, contiguous, with input's shape and
    dtype. Statistics are float32 (float64 for float64). Raises RuntimeError if a shape or dtype
    does not fit. Ba et al., arXiv:1607.06450.
    """
    seen = traced(input, weight, bias)
    op = operator("layer_norm", input, weight, bias) if seen else _C.layer_norm
    return op(input, normalized_shape, weight, bias, eps)


@overload
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    rounding: str = "torch",
    offset: float = 0.0,
    output_format: None = None,
) -> Tensor: ...
@overload
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    rounding: str = "torch",
    offset: float = 0.0,
    output_format: str,
) -> QuantizedRows: ...
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    rounding: str = "torch",
    offset: float = 0.0,
    output_format: str | None = None,
) -> Tensor | QuantizedRows:
    """`torch.nn.functional.rms_norm`, with a choice of the roundings that models use.

        n = input / sqrt(mean(input^2) + eps)
        rounding="torch":  y = (n * (offset + weight)) rounded to input's dtype
        rounding="llama":  y = (offset + weight) * (n rounded to input's dtype)

    input: [..., *normalized_shape], float32, float16, bfloat16 or float64, any strides. weight:
    normalized_shape, any of these dtypes. eps=None means the machine epsilon of the statistics'
    dtype (float32, or float64 for a float64 input), as in torch. Gemma uses offset=1.0. Returns y,
    contiguous, in input's dtype; with rounding="llama", in the dtype that input and weight promote
    to.

    output_format: "int8" or "fp8" returns (codes, scale) instead, which `quantized_linear` takes:
    y, in float32 and without its last rounding, with each row quantized as it is there by
    `input_format`. codes: int8 or float8_e4m3fn, y's shape; scale: float32, [..., 1]. One dimension
    is normalized. Codes have no gradient.

    Raises RuntimeError if a shape or dtype does not fit or if codes would need a gradient, and
    ValueError for an unknown `rounding` or `output_format`. Zhang and Sennrich, arXiv:1910.07467.
    """
    seen = traced(input, weight)
    if output_format is not None:
        check_is_name("rms_norm", output_format)
        name = "rms_norm_quantized"
        op = operator(name, input, weight) if seen else _C.rms_norm_quantized
        options = {"rounding": rounding, "offset": offset, "output_format": output_format}
        return op(input, normalized_shape, weight, eps, **options)
    op = operator("rms_norm", input, weight) if seen else _C.rms_norm
    return op(input, normalized_shape, weight, eps, rounding=rounding, offset=offset)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """LayerNorm of a residual sum, in one pass over memory.

        h = residual + dropout(x)
        y = layer_norm(h, weight.shape, weight, bias, eps)

    x, residual: [..., n], float32, float16, bfloat16 or float64, any strides. h has the dtype that
    the two promote to, so a float32 residual stream stays float32 if x is bfloat16. weight, bias:
    [n]; without a weight, the last dimension is normalized. y has h's dtype if the weight has it
    too, else x's. Returns (y, h), both contiguous. dropout_p: the probability that an element of x
    is dropped; the function has no eval mode, so pass 0.0 there. No mask is stored;
    `torch.manual_seed` makes it reproducible. One autograd node produces both outputs, so a hook or
    `retain_grad` on h sees only the gradient that arrives through h. Raises RuntimeError if a
    shape, a dtype or dropout_p does not fit. Ba et al., arXiv:1607.06450.
    """
    if type(x) is Tensor and not traced(x, residual, weight, bias):
        return _C.add_layer_norm(x, residual, weight, bias, eps, dropout_p=dropout_p)
    op = operator("add_layer_norm", x, residual, weight, bias)
    with sharded_call(dropout_p, x, residual):
        return op(x, residual, weight, bias, eps, dropout_p=dropout_p)


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    rounding: str = "llama",
    offset: float = 0.0,
    dropout_p: float = 0.0,
    output_format: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    rounding: str = "llama",
    offset: float = 0.0,
    dropout_p: float = 0.0,
    output_format: str,
) -> tuple[QuantizedRows, Tensor]: ...
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    rounding: str = "llama",
    offset: float = 0.0,
    dropout_p: float = 0.0,
    output_format: str | None = None,
) -> tuple[Tensor | QuantizedRows, Tensor]:
    """RMSNorm of a residual sum, in one pass over memory.

        h = residual + dropout(x)
        y = rms_norm(h, weight.shape, weight, eps, rounding=rounding, offset=offset)

    Shapes, dtypes and dropout are `add_layer_norm`'s; eps, rounding, offset and output_format are
    `rms_norm`'s. Returns (y, h), both contiguous; with an output_format, y is (codes, scale).
    Raises RuntimeError if a shape, a dtype or dropout_p does not fit or if codes would need a
    gradient, and ValueError for an unknown `rounding` or `output_format`. Zhang and Sennrich,
    arXiv:1910.07467.
    """
    plain = type(x) is Tensor and not traced(x, residual, weight)
    if plain and output_format is None:
        return _C.add_rms_norm(
            x, residual, weight, eps, rounding=rounding, offset=offset, dropout_p=dropout_p
        )
    options = {"rounding": rounding, "offset": offset, "dropout_p": dropout_p}
    if output_format is None:
        op = operator("add_rms_norm", x, residual, weight)
        with sharded_call(dropout_p, x, residual):
            return op(x, residual, weight, eps, **options)
    check_is_name("add_rms_norm", output_format)
    name = "add_rms_norm_quantized"
    op = _C.add_rms_norm_quantized if plain else operator(name, x, residual, weight)
    with sharded_call(dropout_p, x, residual):
        codes, scale, h = op(x, residual, weight, eps, **options, output_format=output_format)
    return (codes, scale), h
