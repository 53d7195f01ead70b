"""Fused kernels for training and serving transformers, as drop-in torch modules."""

from fusedops import functional, nn

__all__ = ["functional", "nn"]
