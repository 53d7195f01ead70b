"""quantize_weight against its reference's lines, and against bitsandbytes of the same bytes."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import fusedops.functional as ours
from benchmarks.case import Contender, Operation, Run, find
from benchmarks.quantized_linear.operations import BITS, Kind
from fusedops.functional.quantized_linear import check_format, quantize_weight_reference

Tensors = tuple[Tensor, ...]


def quantize(kind: Kind, scale: str | None = None) -> Operation:
    """Of a weight [features, depth]; the results are its codes, scales and zeros."""
    contenders = {
        "eager": Contender(partial(_run, by_reference, kind.format, scale)),
        "fusedops": Contender(partial(_run, fused, kind.format, scale)),
    }
    if kind.format == "nf4" and scale != "mse":
        contenders["bitsandbytes"] = Contender(bitsandbytes)

    def bytes_moved(mode: str, weight: Tensor) -> int:
        """The weight once, and its codes."""
        return weight.nbytes + weight.numel() * BITS[kind.format] // 8

    return Operation(
        f"quantize_weight {kind.name}" + (f", {scale}" if scale else ""),
        inputs,
        partial(by_reference, format=kind.format, scale=scale),
        bytes_moved,
        contenders,
        rows=torch.Tensor.float,
    )


def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
    return (torch.randn(*shape, device=device).to(dtype),)


def by_reference(weight: Tensor, format: str, scale: str | None) -> Tensors:
    size, scale = check_format(format, weight.shape[1], None, scale)
    return tuple(t for t in quantize_weight_reference(weight, format, size, scale) if t is not None)


def fused(weight: Tensor, format: str, scale: str | None) -> Tensors:
    return tuple(ours.quantize_weight(weight, format, scale=scale).tensors().values())


def _run(lines, format: str, scale: str | None, weight: Tensor) -> Run:
    return partial(lines, weight, format, scale)


def bitsandbytes(weight: Tensor) -> Run:
    return partial(_bitsandbytes, find("bitsandbytes.functional", "quantize_4bit"), weight)


def _bitsandbytes(quantize_4bit, weight: Tensor) -> Tensors:
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    return packed, state.absmax
