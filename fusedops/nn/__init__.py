"""Drop-in torch.nn modules: same constructors, parameters and state dicts, fused kernels."""

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
