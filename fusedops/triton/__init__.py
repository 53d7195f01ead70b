"""Triton kernels: one file a family, functions with the signature of the operators they fill."""
