"""Experts and QuantizedExperts: modules with the MLPs of a mixture of experts."""

from fusedops.nn.experts.module import Experts
from fusedops.nn.experts.quantized import QuantizedExperts

__all__ = ["Experts", "QuantizedExperts"]
