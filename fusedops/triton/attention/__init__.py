"""attention: softmax attention without the scores in memory. Formulas: functional/attention.py.

A program has a block of queries, or of keys, and walks over tiles of the others: Dao,
arXiv:2307.08691. Gradients are summed in one order, without atomics.
"""

from fusedops.triton.attention.backward import attention_backward
from fusedops.triton.attention.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
