"""Measures the memory of a running step by category, such as parameters or activations."""

from fusedops.profiling.storage.measured import measure_memory
from fusedops.profiling.storage.use import MemoryUse

__all__ = ["MemoryUse", "measure_memory"]
