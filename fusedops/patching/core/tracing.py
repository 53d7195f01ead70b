"""Detects tracing and transforms, which must see every operation."""

import torch

__all__ = ["is_transformed"]


def is_transformed() -> bool:
    """Whether torch.jit.trace, a dispatch mode or torch.func must see every operation.

    Then tensors may have no values yet, and nothing cached in this thread may be used.
    """
    return (
        torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
