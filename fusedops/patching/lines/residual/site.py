"""Decides whether a residual sum and its norm are fused, and runs the rewritten call."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.core.sharded import all_sharded
from fusedops.patching.core.swap import has_hooks
from fusedops.patching.lines.layer import OFF, Kind, Outcome, fuses
from fusedops.patching.lines.residual.rewrite import HELPER, ResidualSum, rewrite
from fusedops.patching.modules.norm.site import recipe_of, row_major

__all__ = ["RESIDUAL", "add_norm"]


def judge(module: nn.Module, residual_sum: ResidualSum) -> Outcome:
    if reason := residual_sum.reason or _why_not_fused(module, residual_sum.norm):
        return Outcome(residual_sum.sum, reason=reason, child=residual_sum.norm)
    recipe = recipe_of(getattr(module, residual_sum.norm))
    remark = "includes the dropout, which draws its own mask" if residual_sum.dropout else ""
    return Outcome(residual_sum.sum, f"add_{recipe.formula}", remark, residual_sum.norm)


def _why_not_fused(module: nn.Module, name: str) -> str:
    """Why a sum cannot be fused into the norm that follows; empty if it can."""
    if reason := follow_class(module):
        return reason
    norm = getattr(module, name)
    recipe = recipe_of(norm)
    if recipe is None:
        return f"its norm ({type(norm).__name__}) is not fused"
    return "" if recipe.adds else "fused sums are normalized over the last dimension only"


def layer_add_norm(layer: nn.Module, *operands, **kwargs) -> tuple[Tensor, Tensor]:
    """add_norm, or the original lines, for example after unpatch; called by a rewritten forward."""
    if "norm" in kwargs:
        operands = kwargs.pop("norm"), *operands
    run = add_norm if fuses(layer, "residual", operands[1]) else add_norm_plain
    return run(*operands, **kwargs)


def add_norm(
    norm: nn.Module, x: Tensor, residual: Tensor, dropout=None, swapped: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of h = x + residual, with dropout on x; fused if that gives the same result.

    dropout: None, a module, or (p, training) of F.dropout. swapped: the lines say residual + x,
    which matters for h's strides. A fused h is contiguous.
    """
    x, p = _dropout(x, dropout)
    first, second = (residual, x) if not p and _mixed(residual, x) else (x, residual)
    fused = None if _why_plain(norm, first, second) else _fused_sum(norm, first, second, p)
    return fused or _plain(norm, F.dropout(x, p) if p else x, residual, swapped)


def add_norm_plain(norm: nn.Module, x: Tensor, residual: Tensor, dropout=None, swapped=False):
    """The original lines that add_norm replaces."""
    x, p = _dropout(x, dropout)
    return _plain(norm, F.dropout(x, p) if p else x, residual, swapped)


def _fused_sum(norm: Any, x: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor] | None:
    return type(norm)._fusedops.add(norm, x, residual, p)


def _plain(norm: nn.Module, x: Tensor, residual: Tensor, swapped: bool) -> tuple[Tensor, Tensor]:
    h = residual + x if swapped else x + residual
    return norm(h), h


def _dropout(x: Tensor, dropout) -> tuple[Tensor, float]:
    """x, and the fraction of it that is still to be dropped."""
    if dropout is None:
        return x, 0.0
    if isinstance(dropout, tuple):
        p, training = dropout
        return x, p if training else 0.0
    if type(dropout) is nn.Dropout and not dropout.inplace and not has_hooks(dropout):
        return x, dropout.p if dropout.training else 0.0
    return dropout(x), 0.0


def _why_plain(norm: nn.Module, x: Tensor, residual: Tensor) -> str:
    """Why the original lines run; empty if they do not, as far as the norm's recipe says."""
    recipe = recipe_of(norm)
    if recipe is None or not recipe.adds:
        return "its norm is not fused"
    if not (type(x) is type(residual) is Tensor or all_sharded(x, residual)):
        return "the operands are not plain tensors"
    if not (x.dtype == residual.dtype or (recipe.mixes and _mixed(x, residual))):
        return "the operands' dtypes differ"
    if x.shape != residual.shape or x.device != residual.device:
        return "the operands' shapes or devices differ"
    if not (row_major(x) and row_major(residual)):
        return "an operand's rows are not contiguous"  # h would keep its strides
    return "its norm has hooks" if has_hooks(norm) else ""


def _mixed(x: Tensor, residual: Tensor) -> bool:
    """Whether x is bfloat16 and residual a float32 stream; either may be a number."""
    dtypes = torch.bfloat16, torch.float32
    return (getattr(x, "dtype", None), getattr(residual, "dtype", None)) == dtypes


def _norm_in(layer: nn.Module, *operands, **kwargs) -> nn.Module:
    return kwargs["norm"] if "norm" in kwargs else operands[0]


def _why(layer: nn.Module, *operands, **kwargs) -> str:
    """Why layer_add_norm runs the original lines; empty if it does not."""
    norm: Any = _norm_in(layer, *operands, **kwargs)
    x, residual = [value for value in operands if value is not norm][:2]
    if not fuses(layer, "residual", x):
        return OFF
    if _mixed(residual, x):
        x, residual = residual, x
    return _why_plain(norm, x, residual) or type(norm)._fusedops.why(norm, residual, True)


def _repeat(layer: nn.Module, *operands, **kwargs) -> Repeat:
    norm = _norm_in(layer, *operands, **kwargs)
    return Repeat(layer_add_norm, layer_add_norm, (layer, *operands), kwargs, (norm,))


decides(layer_add_norm, "residual", at=_norm_in, why=_why, repeat=_repeat)

RESIDUAL = Kind(
    "residual",
    rank=0,
    needs=("norm",),
    rewrite=rewrite,
    helpers={HELPER: layer_add_norm},
    judge=judge,
    unread=lambda roles, original: True,  # any module with a norm may have a sum
    reported="residual",
    without="residual: {}.forward has a norm, but no residual sum of its own",
)
