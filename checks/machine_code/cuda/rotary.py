"""Requires the rotary embedding's CUDA kernels to access memory 16 bytes at a time."""

from checks.machine_code.gates import Demand

DEMANDS = {"rotary<*, 8>": Demand(wide=True)}
