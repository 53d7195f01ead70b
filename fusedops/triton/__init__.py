"""Triton kernels, one package per family. Launchers have their operators' signatures."""
