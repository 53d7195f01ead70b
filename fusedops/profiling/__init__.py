"""Measures where a training step spends its time."""
