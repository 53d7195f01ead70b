"""Replaces the compiled library with the same operators in plain PyTorch.

An operator family's file has the schemas and argument checks, and calls PyTorch or the references
in fusedops/functional. `exports` imports every file and has the functions of fusedops._C.
"""
