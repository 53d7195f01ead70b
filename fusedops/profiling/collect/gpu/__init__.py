"""Measures a step on a GPU: kernels, the host's waits, allocations, clocks and hardware limits."""
