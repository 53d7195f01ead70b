"""Benchmarks of a norm that outputs int8 codes, against quantizing its output separately.

Predicted by counting bytes per element of the bfloat16 rows, with x and the residual read and h
written in either case: quantizing in between writes y (2), reads it twice (2, and 2 from a cache)
and writes the product's operand; codes are written (1) and read (1). So the norm with its codes
should take less than the two calls, and a product of many columns, which takes longer than both,
should hide the difference: under 1 % of it at 256 rows of 4096 by 4096 where codes become float32,
and more the faster the product is.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import Contender, Operation, Run
from fusedops.references.norm import add_rms_norm_reference

Tensors = tuple[Tensor, ...]
LAYOUT = "int8"


def norm_and_product() -> Operation:
    """A shape is (rows, depth, features)."""
    contenders = {
        "quantized in between": Contender(partial(_run, in_between)),
        "fusedops": Contender(partial(_run, of_codes)),
    }
    return Operation(
        "add_rms_norm and quantized_linear int8, int8 inputs",
        inputs,
        reference,
        bytes_moved,
        contenders,
    )


def norm_and_codes() -> Operation:
    """The same without the product. Codes in between are made of the rounded y, so they differ."""
    contenders = {
        "quantized in between": Contender(partial(_run, codes_in_between), checked=False),
        "fusedops": Contender(partial(_run, codes)),
    }
    return Operation(
        "add_rms_norm and its codes",
        inputs,
        codes_reference,
        lambda mode, x, *_: 3 * x.nbytes + x.numel(),
        contenders,
        rows=torch.Tensor.float,
    )


def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
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


def of_codes(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    pair, h = ours.add_rms_norm(x, residual, weight, output_format="int8")
    return ours.quantized_linear(pair, _weight(*q), out_dtype=x.dtype), h


def reference(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    (rows, scale), h = add_rms_norm_reference(x, residual, weight, output_format="int8")
    wide = torch.promote_types(x.dtype, torch.float32)
    dense = q[0].to(wide) * q[1].to(wide)
    return (rows.to(wide) * scale.to(wide) @ dense.t()).to(x.dtype), h


def codes_in_between(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    y, h = ours.add_rms_norm(x, residual, weight)
    made = ours.quantize_weight(y, "int8")
    return made.qweight, made.scales, h


def codes(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    (rows, scale), h = ours.add_rms_norm(x, residual, weight, output_format="int8")
    return rows, scale, h


def codes_reference(x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> Tensors:
    (rows, scale), h = add_rms_norm_reference(x, residual, weight, output_format="int8")
    return rows, scale, h


def bytes_moved(mode: str, x: Tensor, residual: Tensor, weight: Tensor, *q: Tensor) -> int:
    """Counts x, the residual, h and y once, and the weight's codes."""
    y = x.shape[0] * q[0].shape[0] * x.element_size()
    return 3 * x.nbytes + y + sum(t.nbytes for t in q)


def _run(lines: Callable[..., Tensors], *tensors: Tensor) -> Run:
    return partial(lines, *tensors)
