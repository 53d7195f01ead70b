"""Triton kernels and the functions that launch them, in one package per operator family."""
