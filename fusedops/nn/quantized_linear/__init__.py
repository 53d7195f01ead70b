"""The QuantizedLinear module: torch.nn.Linear with a 4- or 8-bit weight."""

from fusedops.nn.quantized_linear.codes import codes_as_buffers, codes_as_parameters
from fusedops.nn.quantized_linear.module import QuantizedLinear

__all__ = ["QuantizedLinear", "codes_as_buffers", "codes_as_parameters"]
