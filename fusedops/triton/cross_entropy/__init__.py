"""Triton cross_entropy and linear_cross_entropy, and linear_log_probs by torch's operators.

A program owns a row of logits and walks over it in 16-byte loads. linear_cross_entropy lets torch
do the matmuls, and calls the same kernels on tiles of the logits. linear_log_probs has the same
tiles, but no kernel.
"""

from fusedops.triton.cross_entropy.linear import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from fusedops.triton.cross_entropy.log_probs import (
    linear_log_probs_backward,
    linear_log_probs_forward,
)
from fusedops.triton.cross_entropy.logits import cross_entropy_backward, cross_entropy_forward

__all__ = [
    "cross_entropy_backward",
    "cross_entropy_forward",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_forward",
    "linear_log_probs_backward",
    "linear_log_probs_forward",
]
