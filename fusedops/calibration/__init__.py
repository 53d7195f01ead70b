"""Timed calls of our kernels and of torch's code, which choose between the two on CPUs."""
