"""Benchmarks of quantize_weight, and of a norm whose output is int8 codes.

quantize_weight is timed against its reference and, for nf4, bitsandbytes. The norm is timed against
quantizing its output separately.

Predicted for the norm by counting bytes per element of the bfloat16 rows, with x and the residual
read and h written in either case: quantizing in between writes y (2), reads it twice (2, and 2 from
a cache) and writes the product's operand; codes are written (1) and read (1). So the norm with its
codes should take less than the two calls, and a product of many columns, which takes longer than
both, should hide the difference: under 1 % of it at 256 rows of 4096 by 4096 where codes become
float32, and more the faster the product is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import Contender, Operation, Run, calling, find
from fusedops.functional.quantized_linear import check_format
from fusedops.references.norm import add_rms_norm_reference
from fusedops.references.quantized_linear import quantize_weight_reference

Tensors = tuple[Tensor, ...]
BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4}
LAYOUT = "int8"


def quantize(format: str) -> Operation:
    """Quantizes a weight [features, depth]; the results are codes, scales and zeros."""
    contenders = {
        "eager": calling(partial(by_reference, format=format)),
        "fusedops": calling(partial(fused, format=format)),
    }
    if format == "nf4":
        contenders["bitsandbytes"] = Contender(bitsandbytes)

    def bytes_moved(mode: str, weight: Tensor) -> int:
        """Counts the weight once, and its codes."""
        return weight.nbytes + weight.numel() * BITS[format] // 8

    return Operation(
        f"quantize_weight {format}",
        weight_inputs,
        partial(by_reference, format=format),
        bytes_moved,
        contenders,
        rows=torch.Tensor.float,
    )


def weight_inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
    return (torch.randn(*shape, device=device).to(dtype),)


def by_reference(weight: Tensor, format: str) -> Tensors:
    size, scale = check_format(format, weight.shape[1], None, None)
    return tuple(t for t in quantize_weight_reference(weight, format, size, scale) if t is not None)


def fused(weight: Tensor, format: str) -> Tensors:
    return tuple(ours.quantize_weight(weight, format).tensors().values())


def bitsandbytes(weight: Tensor) -> Run:
    return partial(_bitsandbytes, find("bitsandbytes.functional", "quantize_4bit"), weight)


def _bitsandbytes(quantize_4bit: Callable[..., Any], weight: Tensor) -> Tensors:
    form = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": False}
    packed, state = quantize_4bit(weight, **form)
    return packed, state.absmax


def norm_and_product() -> Operation:
    """A shape is (rows, depth, features)."""
    contenders = {
        "quantized in between": calling(in_between),
        "fusedops": calling(norm_then_product),
    }
    return Operation(
        "add_rms_norm and quantized_linear int8, int8 inputs",
        norm_inputs,
        reference,
        norm_bytes,
        contenders,
    )


def norm_and_codes() -> Operation:
    """The same without the product. Codes in between are made of the rounded y, so they differ."""
    contenders = {
        "quantized in between": Contender(
            lambda *tensors: partial(codes_in_between, *tensors), checked=False
        ),
        "fusedops": calling(codes),
    }
    return Operation(
        "add_rms_norm and its codes",
        norm_inputs,
        codes_reference,
        lambda mode, x, *_: 3 * x.nbytes + x.numel(),
        contenders,
        rows=torch.Tensor.float,
    )


def norm_inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
    """x, the residual, the norm's weight, and the product's codes and scales."""
    rows, depth, features = shape
    x, residual = torch.randn(2, rows, depth, device=device).to(dtype)
    q = ours.quantize_weight(torch.randn(features, depth, device=device) / depth**0.5, LAYOUT)
    return x, residual, torch.ones(depth, device=device).to(dtype), q.qweight, q.scales


def _weight(qweight: Tensor, scales: Tensor) -> ours.QuantizedWeight:
    n, k = qweight.shape
    return ours.QuantizedWeight(LAYOUT, n, k, k, qweight, scales)


def in_between(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    y, h = ours.add_rms_norm(x, residual, weight)
    return ours.quantized_linear(y, _weight(*q), input_format="int8"), h


def norm_then_product(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    pair, h = ours.add_rms_norm(x, residual, weight, output_format="int8")
    return ours.quantized_linear(pair, _weight(*q), out_dtype=x.dtype), h


def reference(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    (rows, scale), h = add_rms_norm_reference(x, residual, weight, output_format="int8")
    wide = torch.promote_types(x.dtype, torch.float32)
    dense = q[0].to(wide) * q[1].to(wide)
    return (rows.to(wide) * scale.to(wide) @ dense.t()).to(x.dtype), h


def codes_in_between(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    y, h = ours.add_rms_norm(x, residual, weight)
    quantized = ours.quantize_weight(y, "int8")
    return quantized.qweight, quantized.scales, h


def codes(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    (rows, scale), h = ours.add_rms_norm(x, residual, weight, output_format="int8")
    return rows, scale, h


def codes_reference(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    (rows, scale), h = add_rms_norm_reference(x, residual, weight, output_format="int8")
    return rows, scale, h


def norm_bytes(mode: str, x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> int:
    """Counts x, the residual, h and y once, and the weight's codes."""
    y = x.shape[0] * q[0].shape[0] * x.element_size()
    return 3 * x.nbytes + y + sum(t.nbytes for t in q)
