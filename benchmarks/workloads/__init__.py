"""Benchmarks outside the operator tables, such as training steps, generation and sweeps."""
