"""Multiplies attention weights that were not computed with the values, by `attention`."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.functional import attention
from fusedops.patching.core.attention import autocast_dtype, why_slow, why_unfit
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.masks import simplest, visible
from fusedops.patching.lines.attention.scores import Scores
from fusedops.patching.lines.attention.trial import why_wrong
from fusedops.patching.lines.layer import OFF, fuses

__all__ = ["HIDES", "UNREAD", "attended"]

# Adding such a number to any sane score leaves a probability of 0 in float32.
HIDES = -1e4
BLIND = "a query sees no key"
UNREAD = "an operation on the scores does not fit"


def attended(
    scores: Scores, v: Tensor, order: tuple[int, ...] | None, lines: Callable[[], Tensor]
) -> Tensor:
    """The weights times v, with its dimensions in another order. lines: computes it as written."""
    masks = _masks(scores, v)
    if isinstance(masks, str):
        return lines()
    out = _attention(*_arguments(scores, v, *masks))
    out = out.squeeze(1) if scores.ndim == 3 else out
    return out if order is None else out.permute(order)


def _arguments(scores: Scores, v: Tensor, mask: Tensor | None, causal: bool) -> tuple:
    scale, softcap, dropout_p = scores.scale, scores.softcap, scores.dropout_p
    return *_operands(scores, v), mask, causal, scale, softcap, dropout_p


def _masks(scores: Scores, v: Tensor) -> tuple[Tensor | None, bool] | str:
    """(mask, causal) for `attention`, or why the model's lines run."""
    if not fuses(scores.layer, "attention", None):
        return OFF
    q, dtype = scores.q, autocast_dtype(scores.q)
    if v.dim() != scores.ndim:
        return "query, key and value differ in their number of dimensions"
    if not dtype and not scores.dtype == q.dtype == v.dtype:
        return "the dtypes differ"
    if not scores.fill <= HIDES:
        return UNREAD
    operands = _operands(scores, v)
    if reason := why_unfit(*operands):
        return reason
    if operands[1].shape[1] not in (1, operands[0].shape[1]):
        return "the numbers of heads are incompatible"
    masks = _simplest(scores, dtype or q.dtype)
    if isinstance(masks, str):
        return masks
    mask, causal = masks
    if mask is not None and scores.ndim == mask.dim() == 3:
        mask = mask.unsqueeze(1)
    slow = why_slow(*operands, mask, causal, scores.dropout_p) if scores.softcap is None else ""
    return slow or why_wrong(scores, v, (mask, causal), _attention) or (mask, causal)


def _operands(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a dimension for heads."""
    q, k = scores.q, scores.k
    return (q, k, v) if scores.ndim == 4 else (q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))


def _simplest(scores: Scores, dtype: torch.dtype) -> tuple[Tensor | None, bool] | str:
    hidden, bias = scores.hidden, scores.bias
    if bias is None:
        seen = (None, False) if hidden is None else visible(hidden, zeros=scores.fill == -math.inf)
        return BLIND if seen is None else seen
    if hidden is None:
        return simplest(bias, dtype)
    if scores.fill != -math.inf:  # whose place relative to the bias matters where all are hidden
        return "the scores have a mask and a bias"
    return bias.masked_fill(hidden, -math.inf), False


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    dropout_p: float,
) -> Tensor:
    """The kernel's result. Autocast casts q, k and v, and leaves the numbers in a mask."""
    if dtype := autocast_dtype(q):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with torch.autocast(q.device.type, enabled=False) if dtype else nullcontext():
        out: Any = attention(
            q, k, v, causal=causal, softcap=softcap, bias=mask, scale=scale, dropout_p=dropout_p
        )
    return out


def _lines(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    dropout_p: float,
) -> Tensor:
    """What a model's lines compute."""
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), dropout_p).to(autocast_dtype(q) or v.dtype) @ v


def _why(scores: Scores, v: Tensor, *_: Any) -> str:
    masks = _masks(scores, v)
    return masks if isinstance(masks, str) else ""


def _repeat(scores: Scores, v: Tensor, *_: Any) -> Repeat:
    masks = _masks(scores, v)
    fused, masks = (_lines, (None, False)) if isinstance(masks, str) else (_attention, masks)
    return Repeat(fused, _lines, _arguments(scores, v, *masks), {})


decides(attended, "attention", at=lambda scores, *_: scores.layer, why=_why, repeat=_repeat)
