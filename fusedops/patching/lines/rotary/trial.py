"""Runs a rotary function to find what it computes."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fusedops.functional import rotary_embedding
from fusedops.patching.core.probing import (
    BF16,
    F16,
    F32,
    F64,
    drawn,
    quiet,
    reachable_functions,
    undisturbed,
    within,
)
from fusedops.patching.lines.rotary.branches import unproven
from fusedops.patching.lines.rotary.rotation import (
    CANDIDATES,
    LAYOUTS,
    Layout,
    Rotation,
    Signature,
)
from fusedops.references.rotary import rotary_embedding_reference

__all__ = ["FLOATS", "Options", "identify", "signatures"]

FLOATS = F32, BF16, F16
UNKNOWN = "not a supported rotation"
OTHER = "it does not take q, k, cos, sin"
# Words in the names of parameters that hold cos and sin together.
TABLES = {"cache", "cis", "emb", "freq", "freqs", "rope", "table"}

Options = tuple[tuple[str, Any], ...]  # the keywords of a call that are no operands


def identify(function: FunctionType) -> dict[Options, Rotation] | str:
    """The function's rotations by the options of a call, or why they cannot be determined."""
    parameters = inspect.signature(function).parameters
    rotations: dict[Options, Rotation] = {}
    reasons: list[str] = []
    if [*parameters][2:4] == ["cos", "sin"] and not _required(function)[4:]:
        plain = _checked(function, _identify_by_running(function))
        if isinstance(plain, Rotation):
            return {(): plain}
        reasons.append(plain)
    forms = [] if "unsqueeze_dim" in parameters else signatures(function)
    switches = [name for name, p in parameters.items() if isinstance(p.default, bool)]
    choices: list[Options] = [((name, on),) for name in switches for on in (False, True)]
    for options in [(), *choices] if forms else ():
        rotation = _with_layouts(partial(function, **dict(options)), forms)
        rotation = _checked(function, rotation, {*switches})
        if isinstance(rotation, Rotation):
            rotations[options] = rotation
        else:
            reasons.append(rotation)
    return rotations or next(iter(reasons), OTHER)


def signatures(function: FunctionType) -> list[Signature]:
    """The signatures that a function may have by its parameters' names."""
    names = _required(function)
    words = [set(name.lower().split("_")) for name in names]
    match words:
        case [_, *_, first, second] if len(names) < 5 and {"cos", "sin"} <= first | second:
            pack = "cos, sin" if "cos" in first else "sin, cos"
            return [Signature(names, len(names) - 2, pack)]
        case [_, *_, table] if len(names) < 4 and table & TABLES:
            return [
                Signature(names, len(names) - 1, pack) for pack in ("complex", "pairs", "sides")
            ]
    return []


def _required(function: FunctionType) -> tuple[str, ...]:
    """The names of the parameters without a default; none if one takes several arguments."""
    parameters = inspect.signature(function).parameters.values()
    if not all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        return ()
    return tuple(p.name for p in parameters if p.default is p.empty)


def _checked(
    function: FunctionType, rotation: Rotation | str, options: Iterable[str] = ()
) -> Rotation | str:
    if isinstance(rotation, str):
        return rotation
    uses = list(reachable_functions(object, [function]))
    return unproven(uses, {*options}, rotation.signature is not None) or rotation


def _identify_by_running(function: FunctionType) -> Rotation | str:
    """The rotation of a function of q, k, cos, sin and perhaps an unsqueeze_dim."""
    given = inspect.signature(function).parameters.get("unsqueeze_dim")
    dims = (given.default, 2) if given else (-2,)
    if given and given.default not in (1, 2):
        return f"its unsqueeze_dim is {given.default}, not 1 or 2"
    try:
        with _apart():
            candidates = (replace(c, dim=dims[0]) for c in CANDIDATES)
            rotation = next((c for c in candidates if _agree(function, c, dims, 8, F64, F64)), None)
            return UNKNOWN if rotation is None else _proven(function, rotation, dims)
    except _Unrunnable as error:
        return f"running it raised {error}"


def _with_layouts(function: Callable, forms: list[Signature]) -> Rotation | str:
    """The rotation of a function that takes its tables in some layouts only."""
    with _apart():
        for form in forms:
            layouts: dict[Rotation, list[Layout]] = {}
            for layout in LAYOUTS:
                if rotation := _in_layout(function, form, layout):
                    layouts.setdefault(replace(rotation, dim=1, signature=form), []).append(layout)
            for rotation, proven in layouts.items():  # the first one's
                return replace(rotation, signature=replace(form, layouts=tuple(proven)))
    return UNKNOWN


def _in_layout(function: Callable, form: Signature, layout: Layout) -> Rotation | None:
    run, signature = form.taking_both(function, layout), replace(form, layouts=(layout,))
    for candidate, sign in product(CANDIDATES, (1, -1)):
        rotation = replace(candidate, sign=sign, dim=layout.heads, signature=signature)
        try:
            if _agree(run, rotation, (layout.heads,), 8, F64, F64):
                proven = _proven(run, rotation, (layout.heads,))
                return proven if isinstance(proven, Rotation) else None
        except _Unrunnable:  # perhaps of this layout, or of a table of this width
            continue
    return None


@contextmanager
def _apart() -> Iterator[None]:
    """Runs a model's function without effects on the process."""
    no_autocast = torch.autocast("cpu", enabled=False)
    with undisturbed(), quiet("cpu"), torch.device("cpu"), no_autocast:
        yield


class _Unrunnable(Exception):
    """The error that a model's function raised."""


@contextmanager
def _theirs() -> Iterator[None]:
    """Raises _Unrunnable for an error of the model's function; wrap no code of ours."""
    try:
        yield
    except Exception as error:
        raise _Unrunnable(type(error).__name__) from error


def _proven(function: Callable, rotation: Rotation, dims: tuple[int, ...]) -> Rotation | str:
    """`rotation` with the fields that further runs determine, or why it does not match."""
    example = _arguments(rotation, 8, rotation.dim, BF16, F32)
    transposed = example[0].transpose(-3, -2).contiguous().transpose(-3, -2)
    with torch.no_grad(), _theirs():
        results, view = function(*example), function(transposed, *example[1:])
        with torch.autocast("cpu", BF16):
            cast = [y.dtype for y in function(*example)] != [y.dtype for y in results]
    back = results[0].dtype == BF16
    rotation = replace(rotation, back=back, cast=cast, keeps=not view[0].is_contiguous())
    is_complex = rotation.signature is not None and rotation.signature.pack == "complex"
    for table, dtype in product((F32,) if is_complex else FLOATS, FLOATS):
        if not _agree(function, rotation, dims, 8, dtype, table):
            return UNKNOWN
    part = replace(rotation, partial=True)
    try:
        return part if _agree(function, part, dims, 14, F32, F32) else rotation
    except _Unrunnable:  # an assert of the function's
        return rotation


def _arguments(
    rotation: Rotation, width: int, dim: int, dtype: torch.dtype, table: torch.dtype
) -> tuple[Tensor, ...]:
    """Random q, k, cos and sin. The table has 8 elements, all different."""
    draw = torch.Generator().manual_seed(0)
    places = (5,) if rotation.dim == -2 else (2, 5)
    at = dim % (len(places) + 2)
    entries = 4 if rotation.halves else 8
    heads = (drawn(draw, *places[:at], h, *places[at:], width) for h in (3, 2))
    if rotation.signature is not None and not rotation.signature.layouts[0].batch:
        places = (1, 5)
    tables = (drawn(draw, *places, entries) for _ in range(2))
    return *(x.to(dtype) for x in heads), *(t.to(table) for t in tables)


def _agree(
    function: Callable,
    rotation: Rotation,
    dims: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    table: torch.dtype,
) -> bool:
    """Whether function and rotation agree up to rounding, in values and gradients."""
    return all(_agree_at(function, rotation, dim, width, dtype, table) for dim in dims)


def _agree_at(
    function: Callable,
    rotation: Rotation,
    dim: int,
    width: int,
    dtype: torch.dtype,
    table: torch.dtype,
) -> bool:
    args = _arguments(rotation, width, dim, dtype, table)
    kwargs = {} if dim == rotation.dim else {"unsqueeze_dim": dim}
    with _theirs():
        try:
            theirs = list(_results(partial(function, **kwargs), args))
        except (RuntimeError, ValueError, IndexError, TypeError):  # wrong width for the function
            return False
    reference = partial(rotation.by, rotary_embedding_reference, dim=dim)
    exact = list(_results(reference, [a.double() for a in args]))
    ours = list(_results(partial(rotation.by, rotary_embedding, dim=dim), args))
    coarse = max(torch.finfo(dtype).eps, torch.finfo(F32).eps)  # some functions compute in float32
    return len(theirs) == len(ours) and all(
        original.shape == fused.shape
        and (original.dtype == fused.dtype or dtype == F64)
        and within(original, true, 8 * coarse)
        and within(fused, true, 8 * coarse)
        for original, fused, true in zip(theirs, ours, exact, strict=True)
    )


def _results(run: Callable, args: Any) -> Iterator[Tensor]:
    """The outputs, and the gradients of q and k."""
    leaves = [a.clone().requires_grad_() for a in args[:2]]
    with torch.enable_grad():
        outputs = run(*leaves, *args[2:])
    yield from (y.detach() for y in outputs)
    draw = torch.Generator().manual_seed(1)
    cotangents = [drawn(draw, *y.shape).to(y.dtype) for y in outputs]
    yield from torch.autograd.grad(outputs, leaves, cotangents)
