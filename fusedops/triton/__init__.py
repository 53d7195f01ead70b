"""Triton kernels, one package per family. A launcher has its operator's signature."""
