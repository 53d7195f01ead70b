"""Whether somebody besides autograd looks at the operations that run now."""

import torch

__all__ = ["is_transformed"]


def is_transformed() -> bool:
    """Whether torch.jit.trace, a dispatch mode or torch.func has to see every operation.

    Then values may be no numbers yet, and what was seen before in this thread may not be used.
    """
    return (
        torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
