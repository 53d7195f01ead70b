"""Requires 16-byte memory reads in quantized_linear's CUDA kernels."""

from checks.machine_code.gates import Demand

# They write only a few numbers.
DEMANDS = {
    "gemv<*, true, *>": Demand(reads=True),
    "multiply<*>": Demand(reads=True),
}

FORMATS = ("int8", "int4", "nf4", "fp8")  # csrc/kernels/quantized_linear.h
NAMES = {f"WeightFormat {i}": format for i, format in enumerate(FORMATS)}
