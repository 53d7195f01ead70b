"""Triton attention kernels, which never store the scores.

A program owns a block of queries (or keys) and loops over tiles of the other: Dao,
arXiv:2307.08691. Gradients are summed in a fixed order, without atomics.
"""

from fusedops.triton.attention.backward import attention_backward
from fusedops.triton.attention.forward import attention_forward, cached_attention_forward

__all__ = ["attention_backward", "attention_forward", "cached_attention_forward"]
