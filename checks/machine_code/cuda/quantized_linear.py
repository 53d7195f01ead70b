"""Requires 16-byte memory accesses in most of quantized_linear's CUDA kernels."""

from checks.machine_code.gates import Demand

# Products write only a few numbers. A row's codes are float32. A thread loads 8 vectors of the row,
# and 8 more only if the row has another piece.
DEMANDS = {
    "gemv<*, true, *>": Demand(reads=True),
    "multiply<*>": Demand(reads=True),
    "quantize_rows<*, 1, *>": Demand(),
    "quantize_rows<fp32, *>": Demand(loads=16, stores=8),
    "quantize_rows<*>": Demand(loads=16, stores=16),
}

FORMATS = ("int8", "int4", "nf4", "fp8")  # csrc/kernels/quantized_linear.h
NAMES = {f"WeightFormat {i}": format for i, format in enumerate(FORMATS)}
NAMES |= {f"RowFormat {i}": format for i, format in enumerate(("none", "int8", "fp8"))}
