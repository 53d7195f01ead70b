"""Counts a live step's bytes exactly, by each storage's purpose."""

from fusedops.profiling.storage.measured import measure_memory
from fusedops.profiling.storage.use import MemoryUse

__all__ = ["MemoryUse", "measure_memory"]
