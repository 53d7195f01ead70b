"""Public functions on tensors: attention, norms, losses, linears, experts and others."""

from fusedops.functional.adamw import clip_grad_norm_
from fusedops.functional.attention import attention, scaled_dot_product_attention
from fusedops.functional.cross_entropy import (
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
)
from fusedops.functional.experts import dequantize_experts, experts, quantize_experts
from fusedops.functional.gated_activation import geglu, swiglu
from fusedops.functional.linear import linear
from fusedops.functional.merge_attention import merge_attention
from fusedops.functional.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedops.functional.quantized_linear import (
    QuantizedWeight,
    dequantize_weight,
    quantize_weight,
    quantized_linear,
)
from fusedops.functional.rotary import rotary_embedding

__all__ = [
    "QuantizedWeight",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "clip_grad_norm_",
    "cross_entropy",
    "dequantize_experts",
    "dequantize_weight",
    "experts",
    "geglu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "merge_attention",
    "quantize_experts",
    "quantize_weight",
    "quantized_linear",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "swiglu",
]
