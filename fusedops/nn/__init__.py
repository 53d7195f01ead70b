"""Modules with fused kernels: drop-in replacements for torch.nn's, and some that torch.nn lacks.

The replacements have the arguments, parameters and state dicts of torch.nn's modules.
"""

from fusedops.nn.attention import MultiheadAttention
from fusedops.nn.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss
from fusedops.nn.experts import Experts, QuantizedExperts
from fusedops.nn.gated_activation import GEGLU, SwiGLU
from fusedops.nn.linear import Linear
from fusedops.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from fusedops.nn.quantized_linear import QuantizedLinear
from fusedops.nn.quantized_linear.codes import codes_as_buffers, codes_as_parameters

__all__ = [
    "GEGLU",
    "AddLayerNorm",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "Experts",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "MultiheadAttention",
    "QuantizedExperts",
    "QuantizedLinear",
    "RMSNorm",
    "SwiGLU",
    "codes_as_buffers",
    "codes_as_parameters",
]
