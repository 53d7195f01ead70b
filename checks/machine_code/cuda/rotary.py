"""Requires 16-byte memory access in the rotary embedding's vectorized CUDA kernels."""

from checks.machine_code.gates import Demand

DEMANDS = {"rotary<*, 8>": Demand(wide=True)}
