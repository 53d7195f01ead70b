"""Requires 16-byte memory reads in quantized_linear's CUDA kernel."""

from checks.machine_code.gates import Demand

DEMANDS = {"gemv<*, true, *>": Demand(reads=True)}  # it writes only a few numbers

FORMATS = ("int8", "int4", "nf4", "fp8")  # csrc/kernels/quantized_linear.h
NAMES = {f"WeightFormat {i}": format for i, format in enumerate(FORMATS)}
