"""Exact bytes of a live step, by what each storage holds."""

from fusedops.profiling.storage.measured import measure_memory
from fusedops.profiling.storage.use import MemoryUse

__all__ = ["MemoryUse", "measure_memory"]
