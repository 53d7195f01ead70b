"""Measures the memory of a running step by category, such as parameters or activations."""

from fusedops.measuring.memory.measured import measure_memory
from fusedops.measuring.memory.memory_use import MemoryUse

__all__ = ["MemoryUse", "measure_memory"]
