"""Replaces the compiled library with the same operators in plain PyTorch.

Each family's file has its operators' schemas and argument checks, and calls the references in
fusedops/functional. `exports` imports every file and has the functions of fusedops._C.
"""
