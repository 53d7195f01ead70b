"""Reads written-out attention at run time, one line of the model after the other.

    scores = q @ k.transpose(-2, -1) * scale    Scores(q, k), then Scores(q, k, scale)
    scores = scores.masked_fill(mask, -inf)     Scores(q, k, scale, hidden=mask)
    weights = drop(scores.softmax(-1))          Scores(..., softmaxed=True, dropout_p=drop.p)
    y = weights @ v                             attention(q, k, v, ...)

A rewritten forward calls `begin` for the first product and `step` for every other operation. They
compute nothing until the last product. An operation that does not fit is run as it is written, on
scores that all operations before it have computed, in their order.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedops.patching.core.attention import autocast_dtype
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.swap import has_hooks
from fusedops.patching.lines.attention.einsum import factors, values_of
from fusedops.patching.lines.attention.product import HIDES, UNREAD, attended
from fusedops.patching.lines.attention.scores import (
    Scores,
    check_versions,
    computed,
    run,
    versions,
)
from fusedops.patching.lines.layer import fuses

__all__ = [
    "CASTS",
    "DROPS",
    "FUNCTIONS",
    "IN_PLACE",
    "PRODUCTS",
    "SOFTENS",
    "STEPS",
    "begin",
    "step",
]

FLOATS = torch.float32, torch.bfloat16, torch.float16
BY_NAME = {".float": torch.float32, ".half": torch.float16, ".bfloat16": torch.bfloat16}
# A function of a model -> which argument are scores -> its code, and a copy that passes them on
Passing = dict[int, tuple[CodeType, Callable]]
FUNCTIONS: "WeakKeyDictionary[FunctionType, Passing]" = WeakKeyDictionary()


def begin(layer: nn.Module, how: Any, *args: Any) -> Any:
    """The product of queries and transposed keys, called by a rewritten forward."""
    operands = None if _must_compute(layer, args) else _first_operands(how, args)
    if operands is None:
        return run(how, args, {})
    q, k = operands
    dtype = autocast_dtype(q) or q.dtype
    return Scores(layer, q, k, how, args, {}, dtype, versions(q, k))


def _must_compute(layer: nn.Module, args: tuple) -> bool:
    """Whether a compiler, a tracer or torch.func must see the operations, or patch is off."""
    return (
        not fuses(layer, "attention", None)
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or not all(type(t) is Tensor and t.dtype in FLOATS for t in args if not isinstance(t, str))
    )


def _first_operands(how: Any, args: tuple) -> tuple[Tensor, Tensor] | None:
    """q and k with equal batch dimensions, or None for another product."""
    if how is torch.einsum:
        return factors(*args)
    if len(args) != 2:
        return None
    q, k_transposed = args
    fits = q.dim() == k_transposed.dim() in (3, 4) and q.shape[-1] == k_transposed.shape[-2]
    return (q, k_transposed.mT) if fits else None


def step(layer: nn.Module, how: Any, *args: Any, **kwargs: Any) -> Any:
    """A further operation on scores, called by a rewritten forward."""
    at = next((i for i, a in enumerate(args) if type(a) is Scores), None)
    if at is None:
        return run(how, args, kwargs)
    if isinstance(how, FunctionType):
        code, passing = FUNCTIONS.get(how, {}).get(at, (None, None))
        if passing and how.__code__ is code:
            return passing(layer, *args, **kwargs)
    scores = args[at]
    after = STEPS.get(_key(how))
    result = after(scores, how, args, kwargs) if after else None
    if result is not None:
        return result
    return _written(layer, partial(run, how, [*map(computed, args)], kwargs))


def _key(how: Any) -> Any:
    """What STEPS knows an operation by: a module by its class, if it has no hooks."""
    if isinstance(how, nn.Module):
        return None if has_hooks(how) else type(how)
    return how if getattr(how, "__hash__", None) else None


def _written(layer: nn.Module, lines: Callable[[], Any]) -> Any:
    """An operation on scores that `step` does not take over; counted as such."""
    return lines()


decides(
    _written,
    "attention",
    at=lambda layer, lines: layer,
    why=lambda layer, lines: UNREAD,
    repeat=lambda layer, lines: Repeat(_written, _written, (layer, lines), {}),
)


def _next(scores: Scores, how: Any, args: tuple, kwargs: dict, *more: Tensor, **fields) -> Scores:
    held = (*scores.held, *versions(*more))
    return replace(scores, how=how, args=args, kwargs=kwargs, held=held, **fields)


# What each operation makes of scores; None if it must run as it is written


def _scaled(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Scores | None:
    divides = "/" in how or "div" in how if isinstance(how, str) else "div" in how.__name__
    factor = _number(args[1] if args[0] is scores else args[0])
    if factor is None or len(args) != 2 or kwargs or scores.softmaxed or scores.bias is not None:
        return None
    if divides and args[0] is not scores:
        return None
    factor = (1 / factor if factor else math.nan) if divides else factor
    if not 0 < factor < math.inf:
        return None
    scale, fill, softcap = scores.scale * factor, scores.fill * factor, scores.softcap
    softcap = None if softcap is None else softcap * factor
    return _next(scores, how, args, kwargs, scale=scale, fill=fill, softcap=softcap)


def _number(value: Any) -> float | None:
    """A number, or a tensor of one number that can be read."""
    if type(value) is Tensor and value.dim() == 0 and value.is_cpu and not value.requires_grad:
        return None if value.is_complex() else float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _capped(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Scores | None:
    """tanh, which makes a softcap of the factors after it."""
    masked = scores.hidden is not None or scores.bias is not None
    if len(args) != 1 or kwargs or masked or scores.softmaxed or scores.softcap is not None:
        return None
    return _next(scores, how, args, kwargs, softcap=1.0)


def _filled(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Scores | None:
    shows = how is torch.where and len(args) == 3 and args[1] is scores
    if how is torch.where:
        names = ("mask", "scores", "value") if shows else ("mask", "value", "scores")
    else:
        names = "scores", "mask", "value"
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.keys() != {*names} or given["scores"] is not scores or scores.softmaxed:
        return None
    mask, value = given["mask"], _number(given["value"])
    if value is None or not value <= HIDES or not _goes_with(scores, mask, torch.bool):
        return None
    hidden = ~mask if shows else mask
    if scores.hidden is not None:
        hidden = scores.hidden | hidden
    fill = max(scores.fill, value)
    return _next(scores, how, args, kwargs, mask, hidden=hidden, fill=fill)


def _goes_with(scores: Scores, mask: Any, *dtypes: torch.dtype) -> bool:
    """Whether a mask broadcasts to the scores."""
    if type(mask) not in (Tensor, nn.Parameter) or mask.dtype not in dtypes:
        return False
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    fits = mask.dim() <= scores.ndim and all(n in (1, size) for n, size in sizes)
    return fits and mask.device == scores.device


def _biased(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Scores | None:
    if len(args) != 2 or kwargs or scores.softmaxed:
        return None
    bias = args[1] if args[0] is scores else args[0]
    if not _goes_with(scores, bias, torch.float32, scores.dtype) or not bias.dim():
        return None
    in_place = how in IN_PLACE
    dtype = scores.dtype if in_place else torch.promote_types(scores.dtype, bias.dtype)
    both = bias if scores.bias is None else scores.bias + bias
    return _next(scores, how, args, kwargs, bias, bias=both, dtype=dtype)


def _softmaxed(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Scores | None:
    given = dict(zip(("scores", "dim"), args, strict=False)) | kwargs
    if isinstance(how, nn.Softmax):
        given["dim"] = how.dim
    dtype = given.pop("dtype", None) or scores.dtype
    dim = given.get("dim")
    fits = given.keys() == {"scores", "dim"} and len(args) <= 2 and dtype in FLOATS
    if scores.softmaxed or not fits or dim not in (-1, scores.ndim - 1):
        return None
    return _next(scores, how, args, kwargs, softmaxed=True, dtype=dtype)


def _cast(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Scores | None:
    given = [*args[1:], *kwargs.values()]
    if how in BY_NAME:
        given.append(BY_NAME[how])
    if len(given) != 1 or not kwargs.keys() <= {"dtype"}:
        return None
    dtype = given[0]
    if type(dtype) is Tensor and how != ".type" and dtype.device == scores.device:
        dtype = dtype.dtype
    fits = isinstance(dtype, torch.dtype) and dtype in FLOATS
    return _next(scores, how, args, kwargs, dtype=dtype) if fits else None


def _dropped(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Scores | None:
    given: dict[str, Any]
    if isinstance(how, nn.Dropout):
        given = {"scores": scores, "p": how.p, "training": how.training, "inplace": how.inplace}
    else:
        defaults = {"p": 0.5, "training": True, "inplace": False}
        given = defaults | dict(zip(("scores", "p", "training"), args, strict=False)) | kwargs
    p = given["p"] if given["training"] else 0
    fits = len(args) <= 3 and not given["inplace"] and type(p) in (int, float) and 0 <= p < 1
    if not fits or not scores.softmaxed or scores.dropout_p:
        return None
    return _next(scores, how, args, kwargs, dropout_p=float(p))


def _multiplied(scores: Scores, how: Any, args: tuple, kwargs: dict) -> Any:
    """The product of the weights and the values."""
    if kwargs or not scores.softmaxed:
        return None
    if how is torch.einsum:
        v, order = values_of(*args) or (None, None)
    else:
        v, order = (args[1] if len(args) == 2 and args[0] is scores else None), None
    if type(v) is not Tensor:
        return None
    check_versions(scores.held)
    return attended(scores, v, order, lambda: run(how, [*map(computed, args)], kwargs))


PRODUCTS = dict.fromkeys(
    ("@", ".matmul", ".bmm", torch.matmul, torch.bmm, torch.einsum), _multiplied
)
SOFTENS = dict.fromkeys((".softmax", F.softmax, torch.softmax, nn.Softmax), _softmaxed)
DROPS = dict.fromkeys((F.dropout, nn.Dropout), _dropped)
CASTS = dict.fromkeys((".to", ".type", ".type_as", *BY_NAME), _cast)
SCALES = "*", "*=", ".mul", ".mul_", "/", "/=", ".div", ".div_", torch.mul, torch.div
STEPS: dict[Any, Callable[..., Any]] = {
    **PRODUCTS,
    **SOFTENS,
    **DROPS,
    **CASTS,
    **dict.fromkeys(SCALES, _scaled),
    **dict.fromkeys((".tanh", torch.tanh), _capped),
    **dict.fromkeys(("+", "+=", ".add", ".add_", torch.add), _biased),
    **dict.fromkeys((".masked_fill", ".masked_fill_", torch.masked_fill, torch.where), _filled),
}
IN_PLACE = {how for how in STEPS if isinstance(how, str) and how.endswith(("_", "="))}
