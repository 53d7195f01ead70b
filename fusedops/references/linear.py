"""The definition of linear, in the input's dtype: exact for float64 inputs.

That is why both GELUs avoid the cancellation in the tails of torch's formulas.
"""

import math

import torch
import torch.nn.functional as F

from fusedops.exporting import exports_onnx


def _gelu(z):
    if exports_onnx():  # ONNX has no erfc
        return F.gelu(z)
    return z * torch.erfc(-z / math.sqrt(2)) / 2


ACTIVATIONS = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": _gelu,
    "gelu_tanh": lambda z: z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)),
    "silu": lambda z: z * torch.sigmoid(z),
}


def linear_reference(input, weight, bias=None, activation=None):
    z = F.linear(input, weight, bias)
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    return ACTIVATIONS[activation](wide).to(z.dtype)
