"""The memory of a step, predicted on the meta device."""

from fusedops.profiling.planning.plan import MemoryPlan, memory

__all__ = ["MemoryPlan", "memory"]
