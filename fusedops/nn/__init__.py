"""torch.nn twins: same constructor, parameters and state dict, fused forward and backward."""

from fusedops.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm

__all__ = ["AddLayerNorm", "AddRMSNorm", "LayerNorm", "RMSNorm"]
