"""Stands in for the compiled part: the same operators in PyTorch.

Each family's file has its operators' schemas, the checks of their arguments, and calls the
references of fusedops/functional. `exports` has the functions of fusedops._C.
"""
