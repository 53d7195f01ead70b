"""The QuantizedLinear module: torch.nn.Linear with a 4- or 8-bit weight."""

from fusedops.nn.quantized_linear.module import QuantizedLinear

__all__ = ["QuantizedLinear"]
