"""Definitions: one file per family, its formulas in plain PyTorch."""
