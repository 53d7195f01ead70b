"""QuantizedLinear: torch.nn.Linear with a weight of 4 or 8 bits."""

from fusedops.nn.quantized_linear.module import QuantizedLinear

__all__ = ["QuantizedLinear"]
