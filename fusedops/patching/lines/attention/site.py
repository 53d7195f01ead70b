"""Decides whether attention in a model's own code is fused, and runs calls of torch's function."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedops.functional import scaled_dot_product_attention
from fusedops.patching.core.attention import why_slow, why_unfit
from fusedops.patching.core.calls import FLOAT64, Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.lines.attention.rewrite import BEGIN, SDPA, STEP, AttentionLines, rewrite
from fusedops.patching.lines.attention.steps import begin, step
from fusedops.patching.lines.layer import OFF, Kind, Outcome, fuses

__all__ = ["ATTENTION", "IN_LINES"]

IN_LINES = "scaled_dot_product_attention"  # what the report says that runs
FUNCTION = F.scaled_dot_product_attention  # another library may replace it
SIGNATURE = inspect.signature(scaled_dot_product_attention)
POSITIONAL = 6


def sdpa(layer: nn.Module, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """function(*args, **kwargs), torch's attention, called by a rewritten forward."""
    if _why_torchs(layer, function, *args, **kwargs):
        return function(*args, **kwargs)
    return scaled_dot_product_attention(*args, **kwargs)


def _why_torchs(layer: nn.Module, function: Any, *args: Any, **kwargs: Any) -> str:
    """Why torch's function runs; empty if it does not."""
    if function is not FUNCTION:
        return "its name now refers to another function"
    try:
        call = SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError:
        return "unsupported call signature"
    query, key, value = call["query"], call["key"], call["value"]
    mask: Any = call.get("attn_mask")
    causal, dropout_p = call.get("is_causal", False), call.get("dropout_p", 0.0)
    tensors = query, key, value, *(() if mask is None else (mask,))
    if len(args) > POSITIONAL or not all(type(t) in (Tensor, nn.Parameter) for t in tensors):
        return "query, key, value and attn_mask are not plain tensors"
    if type(dropout_p) not in (int, float) or not 0 <= dropout_p < 1:
        return "dropout_p is not a number from 0 to 1"
    if not fuses(layer, "attention", query):
        return OFF
    if query.dtype == torch.float64:
        return FLOAT64
    if type(causal) is not bool or (causal and mask is not None):
        return "is_causal is not a bool, or there is a mask too"
    if reason := why_unfit(query, key, value, attn_mask=_with_four(mask)):
        return reason
    heads = query.shape[1] == key.shape[1] or bool(call.get("enable_gqa"))
    if not heads or query.shape[3] != key.shape[3] or key.shape[2] != value.shape[2]:
        return "the shapes of query, key and value differ"
    return why_slow(query, key, value, mask, causal, dropout_p)


def _with_four(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


decides(
    sdpa,
    "attention",
    at=lambda layer, *args, **kwargs: layer,
    why=_why_torchs,
    repeat=lambda *args, **kwargs: Repeat(sdpa, sdpa, args, kwargs),
)


def judge(module: nn.Module, lines: AttentionLines) -> Outcome | None:
    """None for lines that stay as they are written, which have a row among the plain calls."""
    if lines.reason:
        return None
    reason = follow_class(module)
    return Outcome(lines.was, "" if reason else IN_LINES, reason)


ATTENTION = Kind(
    "attention",
    rank=4,
    needs=(),
    rewrite=rewrite,
    helpers={SDPA: sdpa, BEGIN: begin, STEP: step},
    judge=judge,
    unread=lambda roles, original: False,  # `find_plain_calls` has a note
    reported="attention",
    callees=True,
)
