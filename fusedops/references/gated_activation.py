"""The definitions of swiglu and geglu.

Plain PyTorch in float32 (float64 for float64), rounded to the result's dtype.
"""

import math

import torch

from fusedops.exporting import exports_onnx
from fusedops.references.quantized_rows import quantized_rows_reference


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


def gated_activation_reference(gate, up, kind, limit, alpha, up_offset):
    """The operators' form of both. kind: "swiglu", "geglu" or "geglu_tanh"."""
    if kind == "swiglu":
        return swiglu_reference(gate, up, limit=limit, alpha=alpha, up_offset=up_offset)
    return geglu_reference(gate, up, approximate="tanh" if kind == "geglu_tanh" else "none")


def gated_activation_quantized_reference(gate, up, kind, limit, alpha, up_offset, output_format):
    options = {"limit": limit, "alpha": alpha, "up_offset": up_offset}
    return swiglu_reference(gate, up, **options, output_format=output_format)


def _operands(gate, up):
    """gate and up in float32 (float64), and y's dtype."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return gate.to(wide), up.to(wide), dtype
