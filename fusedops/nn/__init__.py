"""Drop-in torch.nn modules: same constructor, parameters and state dict, fused passes."""

from fusedops.nn.attention import MultiheadAttention
from fusedops.nn.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss
from fusedops.nn.gated_activation import GEGLU, SwiGLU
from fusedops.nn.linear import Linear
from fusedops.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from fusedops.nn.quantized_linear import QuantizedLinear

__all__ = [
    "GEGLU",
    "AddLayerNorm",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "MultiheadAttention",
    "QuantizedLinear",
    "RMSNorm",
    "SwiGLU",
]
