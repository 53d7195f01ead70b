"""layer_norm, rms_norm and their residual-sum variants, with their references.

Every function is one operator: C++ on CPUs, Triton (or CUDA C++) on GPUs, differentiable ATen calls
elsewhere. The references below define the results.
"""

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from fusedops.extension import _C, traced
from fusedops.functional.jagged import operator
from fusedops.functional.quantized_rows import (
    QuantizedRows,
    check_is_name,
    quantized_rows_reference,
)
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


# References: plain PyTorch in the input's dtype, exact for float64 inputs.


def layer_norm_reference(input, normalized_shape, weight=None, bias=None, eps=1e-5, dtype=None):
    axes = tuple(range(-len(normalized_shape), 0))
    acc = _accumulate(input)
    var, mean = torch.var_mean(acc, axes, correction=0, keepdim=True)
    y = (acc - mean) * (var + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype or input.dtype)


def rms_norm_reference(
    input, normalized_shape, weight=None, eps=None, *, rounding="torch", offset=0.0, dtype=None,
    output_format=None,
):  # fmt: skip
    axes = tuple(range(-len(normalized_shape), 0))
    acc, dtype = _accumulate(input), dtype or input.dtype
    eps = torch.finfo(acc.dtype).eps if eps is None else eps
    n = acc * (acc.square().mean(axes, keepdim=True) + eps).rsqrt()
    if output_format is not None:
        n = n.to(dtype).to(acc.dtype) if rounding == "llama" else n
        y = n if weight is None else n * (offset + weight.to(acc.dtype))
        return quantized_rows_reference(y, output_format)
    if weight is None:
        return n.to(dtype)
    scale = weight if offset == 0 else offset + _accumulate(weight)
    if rounding == "llama":
        return (scale * n.to(dtype)).to(torch.promote_types(dtype, weight.dtype))
    return (n * scale).to(dtype)


def add_layer_norm_reference(x, residual, weight=None, bias=None, eps=1e-5, *, dropout_p=0.0):
    shape = x.shape[-1:] if weight is None else weight.shape
    h = residual + dropout_reference(x, dropout_p, len(shape))
    return layer_norm_reference(h, shape, weight, bias, eps, _stream_dtype(x, h, weight)), h


def add_rms_norm_reference(
    x, residual, weight=None, eps=1e-6, *, rounding="llama", offset=0.0, dropout_p=0.0,
    output_format=None,
):  # fmt: skip
    shape = x.shape[-1:] if weight is None else weight.shape
    h = residual + dropout_reference(x, dropout_p, len(shape))
    dtype = _stream_dtype(x, h, weight)
    options = {"rounding": rounding, "offset": offset, "output_format": output_format}
    return rms_norm_reference(h, shape, weight, eps, dtype=dtype, **options), h


def rms_norm_quantized_reference(*args, output_format="int8", **options):
    return rms_norm_reference(*args, output_format=output_format, **options)


def add_rms_norm_quantized_reference(*args, output_format="int8", **options):
    (codes, scale), h = add_rms_norm_reference(*args, output_format=output_format, **options)
    return codes, scale, h


def dropout_reference(x, p, dims=1, seed=None):
    """x with a fraction p of its elements dropped, by the mask that every kernel draws.

    Philox4x32-7 (Salmon et al., SC 2011), keyed by a 64-bit seed. Element [row, col] has the
    counter (col // 4, low half of row, high half of row, 0). Word col % 4 of the output keeps the
    element if it is at least p * 2^32. A row is the last `dims` dimensions.
    """
    if p == 0:
        return x
    if seed is None:
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)
    rows, n = math.prod(x.shape[:-dims]), math.prod(x.shape[-dims:])
    tracing = torch._C._len_torch_dispatch_stack() > 0  # Inductor miscompiles wrapping products
    mask = torch.ops.fusedops.dropout_mask if tracing else dropout_mask_reference
    return x * mask(seed, rows, n, p).reshape(x.shape) * (0.0 if p == 1 else 1 / (1 - p))


def dropout_mask_reference(seed, rows, n, p):
    """[rows, n] bool: which elements are kept."""
    row = torch.arange(rows, device=seed.device)[:, None]
    zero = torch.zeros(rows, -(-n // 4), dtype=torch.int64, device=seed.device)
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = zero + torch.arange(zero.shape[1], device=seed.device), zero + row, zero, zero
    c1, c2 = c1 & low, c2 + (row >> 32)
    k0, k1 = seed & low, seed >> 32
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the low 64 bits; the sign does not matter
        c0, c1, c2, c3 = p1 >> 32 & low ^ c1 ^ k0, p1 & low, p0 >> 32 & low ^ c3 ^ k1, p0 & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    word = torch.stack([c0, c1, c2, c3], -1).flatten(1)[:, :n]
    return word >= min(int(p * 2**32), low)


def _accumulate(t):
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _stream_dtype(x, h, weight):
    """y's dtype: h's if the weight has it too, else x's (h is a float32 residual stream)."""
    return h.dtype if weight is not None and weight.dtype == h.dtype else x.dtype
