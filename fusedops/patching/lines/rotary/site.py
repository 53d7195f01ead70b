"""Replaces calls to a model's own rotary function of tensors, cos and sin.

    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    q, k = _fusedops_rotary(self, apply_rotary_pos_emb, q, k, cos, sin)

    q = apply_rope(q, cos, sin)             q = _fusedops_rotary(self, apply_rope, q, cos, sin)

The fused version takes one pass over its tensors. The function is a global of the model's module
and is not changed. Running it shows what it computes. Each call decides whether to run the fused
function or the model's.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fusedops.functional import rotary_embedding
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.core.probing import reachable_functions
from fusedops.patching.lines.layer import OFF, Kind, Outcome, fuses
from fusedops.patching.lines.reader import (
    Names,
    Reader,
    blocks,
    calls,
    dotted,
    is_simple,
    replaced,
    stores,
)
from fusedops.patching.lines.rotary.rotation import Rotation
from fusedops.patching.lines.rotary.trial import FLOATS, Options, identify, signatures

__all__ = ["ROTARY"]

HELPER = "_fusedops_rotary"
FORM = "unsupported call signature"
SHAPES = "its tensors and tables do not have the shapes or options of a trial run"
VIEWED = "its output is reshaped with .view, which needs a contiguous result"
RENAMED = "its name now refers to another function"
NAMES = "rope", "rot_emb", "rot_embed"  # in functions' names, if the parameters fit too


@dataclass(frozen=True)
class RotaryCall:
    """A call to a rotary function. source: its text. function: returns what it calls now.

    count: its arguments without a name; -1 if a star hides their number. viewed: whether `view` is
    called on its results.
    """

    source: str
    function: Callable[[], Any]
    count: int
    keywords: frozenset[str]
    viewed: bool


def rewrite(tree: ast.FunctionDef, names: Names) -> list[RotaryCall]:
    """Rewrites `tree` in place. Returns the calls to rotary functions."""
    read, sites = Reader(tree, names), []
    for block in blocks(tree):
        for at, statement in enumerate(block):
            for call in list(calls(statement)) if is_simple(statement) else ():
                if not _is_rotary(read.meaning(call.func)):
                    continue
                source, meaning = ast.unparse(call), partial(read.meaning, call.func)
                stars = any(isinstance(argument, ast.Starred) for argument in call.args)
                keywords = frozenset(str(k.arg) for k in call.keywords)
                count = -1 if stars or "None" in keywords else len(call.args)
                viewed = _viewed(read.tree, statement)
                sites.append(RotaryCall(source, meaning, count, keywords, viewed))
                if count > 0:
                    new = read.helper(HELPER, [call.func, *call.args], call.keywords)
                    block[at] = statement = replaced(statement, call, new)
    ast.fix_missing_locations(tree)
    return sites


def _is_rotary(value: object) -> bool:
    if not isinstance(value, FunctionType):
        return False
    named = any(name in value.__name__ for name in NAMES) and bool(signatures(value))
    return "rotary" in value.__name__ or named


def _viewed(tree: ast.FunctionDef, statement: ast.stmt) -> bool:
    """Whether `view` is called on the statement's results."""
    names = stores(statement)
    viewed = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "view")
    return any(dotted(n.value) in names and n.lineno > statement.lineno for n in viewed)


def judge(module: nn.Module, call: RotaryCall) -> Outcome:
    rotations = rotations_of(call.function())
    if isinstance(rotations, str):
        return Outcome(call.source, reason=rotations)
    fitting = [r for r in rotations.items() if _fits(call, *r)]
    if reason := _why_not_fused(module, call, [rotation for _, rotation in fitting]):
        return Outcome(call.source, reason=reason)
    interleaved = {rotation.interleaved for _, rotation in fitting} == {True}
    return Outcome(call.source, f"rotary_embedding{'(interleaved=True)' if interleaved else ''}")


def _fits(call: RotaryCall, options: Options, rotation: Rotation) -> bool:
    """Whether the call may have these options, with operands as the function takes them."""
    names = rotation.names
    missing, optional = {*names[call.count :]}, {"unsqueeze_dim", *(name for name, _ in options)}
    return 0 < call.count <= len(names) and missing <= call.keywords <= missing | optional


def _why_not_fused(module: nn.Module, call: RotaryCall, rotations: list[Rotation]) -> str:
    """Why a call to a recognised function is skipped; empty if it is not."""
    if reason := follow_class(module):
        return reason
    if call.viewed and not all(rotation.keeps for rotation in rotations):
        return VIEWED
    return "" if rotations else FORM


def may_rotate(roles: list[str], original: type[nn.Module]) -> bool:
    """Whether the forward names a rotary function."""
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    return code is not None and any("rotary" in name for name in code.co_names)


def rotated(layer: nn.Module, function: Any, /, x: Any, *args: Any, **kwargs: Any) -> Any:
    """function(x, *args, **kwargs), called by a rewritten forward."""
    rotation = _rotation(function, kwargs) if fuses(layer, "rotary", x) else None
    operands = rotation and rotation.operands((x, *args), kwargs)
    if not rotation or not operands or _why_theirs(rotation, *operands):
        return function(x, *args, **kwargs)
    results = rotation.by(rotary_embedding, *operands)
    return results[0] if rotation.tensors == 1 else results


def _rotation(function: Any, kwargs: dict[str, Any]) -> Rotation | None:
    """The function's rotation with the options among a call's keywords."""
    rotations = _rotations.get(function, {})
    if not kwargs:
        return rotations.get(())
    options = tuple((name, on) for name, on in kwargs.items() if isinstance(on, bool))
    return rotations.get(options)


def _why_theirs(
    rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int
) -> str:
    """Why the model's function runs; empty if it does not."""
    plain = all(
        type(t) is Tensor and t.layout is torch.strided and t.dtype in FLOATS
        for t in (q, k, cos, sin)
    )
    if not plain:
        return "q, k, cos and sin are not plain float32, bfloat16 or float16"
    if rotation.cast and torch.is_autocast_enabled(q.device.type):
        return "autocast changes its dtype"
    if q.dtype != k.dtype or not q.device == k.device == cos.device == sin.device:
        return "q, k, cos and sin differ in dtype or device"
    fits = (
        cos.dim() > 0
        and cos.shape == sin.shape
        and _goes_with(cos, q, dim)
        and _goes_with(cos, k, dim)
        and rotation.takes(q.shape[-1], cos.shape[-1])
        and rotation.takes(k.shape[-1], cos.shape[-1])
    )
    if not fits:
        return "cos and sin do not broadcast to q and k"
    return "cos and sin need gradients" if cos.requires_grad or sin.requires_grad else ""


def _goes_with(cos: Tensor, x: Tensor, dim: int) -> bool:
    """Whether cos, unsqueezed at dim, broadcasts over x's heads and matches its other sizes."""
    heads = x.dim() - (-dim if dim < 0 else cos.dim() + 1 - dim)
    if not 0 <= heads < x.dim() - 1 or x.dim() <= cos.dim():
        return False
    places = [size for at, size in enumerate(x.shape[:-1]) if at != heads]
    sizes = zip(reversed(cos.shape[:-1]), reversed(places), strict=False)
    return all(size in (1, place) for size, place in sizes)


def _why(layer: nn.Module, function: Any, /, x: Any, *args: Any, **kwargs: Any) -> str:
    """Why `rotated` runs the model's function; empty if it does not."""
    if not fuses(layer, "rotary", x):
        return OFF
    if function not in _rotations:
        return RENAMED
    rotation = _rotation(function, kwargs)
    operands = rotation and rotation.operands((x, *args), kwargs)
    return _why_theirs(rotation, *operands) if rotation and operands else SHAPES


decides(
    rotated,
    "rotary",
    at=lambda layer, *operands, **kwargs: layer,
    why=_why,
    repeat=lambda *operands, **kwargs: Repeat(rotated, rotated, operands, kwargs),
)

# Results of running functions: their rotations by a call's options; and the code they reach, with
# the rotations or the reason why there is none. A function missing here has not been run.
Rotations = dict[Options, Rotation]
_rotations: "WeakKeyDictionary[Any, Rotations]" = WeakKeyDictionary()
_probed: "WeakKeyDictionary[Any, tuple[tuple, Rotations | str]]" = WeakKeyDictionary()


def rotations_of(function: Any) -> Rotations | str:
    """The function's rotations, or why they cannot be determined."""
    if not _is_rotary(function):
        return RENAMED
    codes = tuple(f.__code__ for f in reachable_functions(object, [function]))
    if _probed.get(function, ((), ""))[0] != codes:
        _probed[function] = codes, identify(function)
        _rotations.pop(function, None)
    rotations = _probed[function][1]
    if not isinstance(rotations, str):
        _rotations[function] = rotations
    return rotations


ROTARY = Kind(
    "rotary",
    rank=3,
    needs=("linear", "adapter"),
    rewrite=rewrite,
    helpers={HELPER: rotated},
    judge=judge,
    unread=may_rotate,
    reported="rotary",
)
