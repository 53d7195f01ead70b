"""Benchmarks of quantize_weight, against its reference and, for nf4, bitsandbytes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import Contender, Operation, Run, calling, find
from fusedops.functional.quantized_linear import check_format
from fusedops.references.quantized_linear import FORMATS, quantize_weight_reference

Tensors = tuple[Tensor, ...]


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
        return weight.nbytes + weight.numel() * FORMATS[format].bits // 8

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
