"""Triton kernels, one package per family; launchers have their operators' signatures."""
