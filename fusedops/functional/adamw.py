"""clip_grad_norm_, with the kernels that AdamW clips with."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fusedops.extension import ops

__all__ = ["clip_grad_norm_"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` in one pass over the gradients (two for long ones).

        norm = sqrt(sum of g^2)          g = g min(1, max_norm / (norm + 1e-6))

    parameters: their .grad tensors are scaled in place. The kernels handle the 2-norm of dense
    float32, float16 and bfloat16 gradients on one device, with sums in float32 and float64. torch's
    function handles everything else. The host never waits for a GPU unless error_if_nonfinite is
    set. Returns the norm before clipping, float32 []. Raises RuntimeError if error_if_nonfinite is
    set and the norm is not finite. Pascanu et al., arXiv:1211.5063.
    """
    from torch.nn.utils import clip_grad_norm_ as original

    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if norm_type != 2 or not grads or not _have_kernels(grads):
        if foreach is None and any(map(_is_lazy, grads)):
            foreach = False  # torch's foreach functions cannot write to these tensors
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    squares = ops.adamw_squares(grads)
    norm = squares.sum().sqrt().float()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    ops.adamw_scale(grads, squares, float(max_norm))
    return norm


def _have_kernels(grads: list[Tensor]) -> bool:
    device = grads[0].device
    return all(
        type(g) is Tensor
        and g.dtype in FLOATS
        and g.layout == torch.strided
        and not _is_lazy(g)
        and g.device == device
        and (g.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(g))
        for g in grads
    )


def _is_lazy(t: Tensor) -> bool:
    """Whether t has the negative or conjugate bit. False under Dynamo, which cannot read it."""
    return not torch.compiler.is_compiling() and (t.is_neg() or t.is_conj())
