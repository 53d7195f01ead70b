"""Tries the kernel on the operands of a first call, against the model's lines.

The lines say by torch's own functions what they compute, so the trial is a second check of how
`steps.py` reads them. It runs in float32 on at most 64 queries and keys, without dropout.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fusedops.patching.core.probing import F32, quiet, undisturbed, within
from fusedops.patching.core.swap import one_line, original_class
from fusedops.patching.lines.attention.scores import Scores, run

__all__ = ["why_wrong"]

LENGTH, SHARE = 64, 1e-3
MEANING = "scale", "softcap", "hidden", "bias", "softmaxed"
log = logging.getLogger("fusedops.patching")

# class -> (its lines' operations, what the mask is) -> why the kernel is not used; empty if it is
_tried: "WeakKeyDictionary[type, dict[Hashable, str]]" = WeakKeyDictionary()


def why_wrong(scores: Scores, v: Tensor, masks: tuple, kernel: Callable[..., Tensor]) -> str:
    """Why the lines that made these scores do not run by the kernel; empty if the trial agrees.

    masks: (mask, causal) for the kernel. kernel: takes q, k, v, mask, causal,
    scale, softcap and dropout_p.
    """
    cls, device = original_class(scores.layer), v.device.type
    key = *_operations(scores), masks[0] is None or masks[0].dtype, masks[1]
    tried = _tried.setdefault(cls, {})
    empty = not (scores.q.numel() and scores.k.numel() and v.numel())
    if key in tried or device == "meta" or empty:
        return tried.get(key, "")
    plain = torch.autocast(device, enabled=False)
    try:
        with undisturbed(), torch.no_grad(), quiet(device), plain:
            got, expected = _both(scores, v, masks, kernel)
            if not expected.isfinite().all():  # try the next call instead
                return ""
            reason = "" if within(got, expected, SHARE) else "a trial run differed"
    except Exception as error:  # noqa: BLE001  a model's tensors may be of any class
        reason = f"a trial run failed: {one_line(error)}"
    if reason:
        log.warning("%s runs its own attention: %s", cls.__name__, reason)
    tried[key] = reason
    return reason


def _before(scores: Scores) -> Scores | None:
    """The scores that the last operation got; None for the first product."""
    return next((a for a in scores.args if type(a) is Scores), None)


def _operations(scores: Scores) -> list[Hashable]:
    before = _before(scores)
    how: Any = type(scores.how) if isinstance(scores.how, nn.Module) else scores.how
    return [*([] if before is None else _operations(before)), how]


def _both(
    scores: Scores, v: Tensor, masks: tuple, kernel: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """The kernel's results and the lines', without the queries that see no key of the first."""
    mask, causal = masks
    q, k, v = (t[..., :LENGTH, :].to(F32) for t in (scores.q, scores.k, v))
    expected = _weights(scores, scores, q, k) @ v
    q, k, v, expected = (t if t.dim() == 4 else t.unsqueeze(1) for t in (q, k, v, expected))
    mask = _cut(mask, scores)
    got = kernel(q, k, v, mask, causal, scores.scale, scores.softcap, 0.0)
    if mask is None:
        return got, expected
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(F32).min / 2
    rows = seen.any(-1, keepdim=True)
    return torch.where(rows, got, 0.0), torch.where(rows, expected, 0.0)


def _weights(scores: Scores, whole: Scores, q: Tensor, k: Tensor) -> Tensor:
    """The weights of some queries and keys, by the model's operations, in float32."""
    before = _before(scores)
    if before is None:
        return q @ k.mT
    weights = _weights(before, whole, q, k)
    if all(getattr(scores, name) is getattr(before, name) for name in MEANING):
        return weights  # a cast or a dropout
    args = [weights if a is before else _cut(a, whole) for a in scores.args]
    kwargs = {n: _cut(value, whole) for n, value in scores.kwargs.items() if n != "dtype"}
    return run(scores.how, args, kwargs)


def _cut(value: Any, scores: Scores) -> Any:
    """The part of a mask that belongs to the first queries and keys, in float32."""
    if not isinstance(value, Tensor):
        return value
    for dim in range(-min(2, value.dim()), 0):
        if value.shape[dim] == scores.shape[dim]:
            value = value.narrow(dim, 0, min(LENGTH, value.shape[dim]))
    return value.to(F32) if value.is_floating_point() else value
