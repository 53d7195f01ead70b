"""Experts and QuantizedExperts: the experts of a mixture as modules."""

from fusedops.nn.experts.module import Experts
from fusedops.nn.experts.quantized import QuantizedExperts

__all__ = ["Experts", "QuantizedExperts"]
