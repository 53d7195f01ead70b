"""Benchmarks of whole workloads: training steps, generation, sentence embedding."""
