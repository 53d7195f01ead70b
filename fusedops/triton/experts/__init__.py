"""Triton mixture-of-experts operators: grouped matmuls over rows sorted by expert.

Formulas: functional/experts.py. Sorting is torch's, on the device, and nothing waits for it: tiles
are planned for the most rows that every expert could leave unfilled. Sums have a fixed order,
without atomics.
"""

from fusedops.triton.experts.backward import experts_backward, quantized_experts_backward
from fusedops.triton.experts.forward import experts_forward, quantized_experts_forward

__all__ = [
    "experts_backward",
    "experts_forward",
    "quantized_experts_backward",
    "quantized_experts_forward",
]
