"""Replaces calls to a model's own rotary function of q, k, cos and sin.

    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    q, k = _fusedops_rotary(self, apply_rotary_pos_emb, q, k, cos, sin)

The fused version takes one pass over q and k. The function is a global of the model's module and is
not changed. Running it shows what it computes. Each call decides whether to run the fused function
or the model's.
"""

import ast
import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fusedops.functional import rotary_embedding
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.core.probing import (
    BF16,
    F16,
    F32,
    F64,
    closure_values,
    drawn,
    quiet,
    reachable_functions,
    undisturbed,
    within,
)
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
from fusedops.references.rotary import rotary_embedding_reference

__all__ = ["ROTARY"]

HELPER = "_fusedops_rotary"
FLOATS = F32, BF16, F16
UNKNOWN = "not a supported rotation"
FORM = "unsupported call signature"
BRANCHES = "it has branches, so one run does not show what every call computes"
VIEWED = "its output is reshaped with .view, which needs a contiguous result"

FIXED = FunctionType, BuiltinFunctionType, ModuleType, type  # values assumed not to change


def _full(table: Tensor) -> Tensor:
    return table


def _twice(table: Tensor) -> Tensor:
    """Repeats half a table for both halves of a head."""
    return torch.cat([table, table], -1)


def _neighbours(table: Tensor) -> Tensor:
    """Repeats each entry of half a table for pairs of neighbours."""
    return table.repeat_interleave(2, -1)


def _first_half(table: Tensor) -> Tensor:
    return _neighbours(table[..., : table.shape[-1] // 2])


@dataclass(frozen=True)
class Rotation:
    """A rotary function's formula: `rotary_embedding` with a table made from cos and sin.

    back: whether results have q's and k's dtypes whatever the table's dtype is. partial: whether it
    takes a table narrower than a head. cast: whether autocast changes a dtype. keeps: whether
    results have q's memory layout. dim: where it unsqueezes cos by default.
    """

    interleaved: bool
    table: Callable[[Tensor], Tensor] = _full
    dim: int = 1
    back: bool = False
    partial: bool = False
    cast: bool = False
    keeps: bool = True

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.by(rotary_embedding, q, k, cos, sin, unsqueeze_dim)

    def by(self, run: Callable, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int | None):
        """The results computed by `run`: the fused function or its reference."""
        dim = self.dim if dim is None else dim
        tables = self.table(cos), self.table(sin)
        results = run(q, k, *tables, unsqueeze_dim=dim, interleaved=self.interleaved)
        return (results[0].to(q.dtype), results[1].to(k.dtype)) if self.back else results

    def takes(self, width: int, table: int) -> bool:
        """Whether a head of this width goes with a table of that width."""
        whole = table * (2 if self.table in (_twice, _neighbours) else 1)
        return whole == width or (self.partial and whole < width)


CANDIDATES = [
    Rotation(False),  # Llama
    Rotation(True),  # Cohere
    Rotation(True, _first_half),  # GLM
    Rotation(False, _twice),  # gpt-oss
    Rotation(True, _neighbours),
]


@dataclass(frozen=True)
class RotaryCall:
    """A call to a rotary function. source: its text. function: returns what it calls now."""

    source: str
    function: Callable[[], Any]
    read: bool
    viewed: bool


def rewrite(tree: ast.FunctionDef, names: Names) -> list[RotaryCall]:
    """Rewrites `tree` in place. Returns the calls to rotary functions."""
    read, sites = Reader(tree, names), []
    for block in blocks(tree):
        for at, statement in enumerate(block):
            for call in calls(statement) if is_simple(statement) else ():
                if not _is_rotary(read.meaning(call.func)):
                    continue
                fits, source = _is_plain_call(call), ast.unparse(call)
                meaning = partial(read.meaning, call.func)
                sites.append(RotaryCall(source, meaning, fits, _viewed(read.tree, statement)))
                if fits:
                    new = read.helper(HELPER, [call.func, *call.args], call.keywords)
                    block[at] = statement = replaced(statement, call, new)
    ast.fix_missing_locations(tree)
    return sites


def _is_rotary(value: object) -> bool:
    return isinstance(value, FunctionType) and "rotary" in value.__name__


def _is_plain_call(call: ast.Call) -> bool:
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return (
        len(call.args) == 4 and not starred and {k.arg for k in call.keywords} <= {"unsqueeze_dim"}
    )


def _viewed(tree: ast.FunctionDef, statement: ast.stmt) -> bool:
    """Whether `view` is called on the statement's results."""
    names = stores(statement)
    viewed = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "view")
    return any(dotted(n.value) in names and n.lineno > statement.lineno for n in viewed)


def judge(module: nn.Module, call: RotaryCall) -> Outcome:
    rotation = rotation_of(call.function())
    if isinstance(rotation, str):
        return Outcome(call.source, reason=rotation)
    if reason := _why_not_fused(module, call, rotation):
        return Outcome(call.source, reason=reason)
    options = "(interleaved=True)" if rotation.interleaved else ""
    return Outcome(call.source, f"rotary_embedding{options}")


def _why_not_fused(module: nn.Module, call: RotaryCall, rotation: Rotation) -> str:
    """Why a call to a recognised function is skipped; empty if it is not."""
    if reason := follow_class(module):
        return reason
    if call.viewed and not rotation.keeps:
        return VIEWED
    return "" if call.read else FORM


def may_rotate(roles: list[str], original: type[nn.Module]) -> bool:
    """Whether the forward names a rotary function."""
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    return code is not None and any("rotary" in name for name in code.co_names)


def rotated(
    layer: nn.Module, function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: int
) -> tuple[Tensor, Tensor]:
    """function(q, k, cos, sin), called by a rewritten forward."""
    rotation = _rotations.get(function) if fuses(layer, "rotary", q) else None
    if rotation and not _why_theirs(
        rotation, q, k, cos, sin, kwargs.get("unsqueeze_dim", rotation.dim)
    ):
        return rotation(q, k, cos, sin, **kwargs)
    return function(q, k, cos, sin, **kwargs)


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


def _why(
    layer: nn.Module, function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: int
) -> str:
    """Why `rotated` runs the model's function; empty if it does not."""
    if not fuses(layer, "rotary", q):
        return OFF
    rotation = _rotations.get(function)
    if rotation is None:
        return "its name now refers to another function"
    return _why_theirs(rotation, q, k, cos, sin, kwargs.get("unsqueeze_dim", rotation.dim))


decides(
    rotated,
    "rotary",
    at=lambda layer, *operands, **kwargs: layer,
    why=_why,
    repeat=lambda *operands, **kwargs: Repeat(rotated, rotated, operands, kwargs),
)

# Results of running functions: their rotation; and the code they reach, with the rotation or the
# reason why there is none. A function missing here has not been run.
_rotations: "WeakKeyDictionary[Any, Rotation]" = WeakKeyDictionary()
_probed: "WeakKeyDictionary[Any, tuple[tuple, Rotation | str]]" = WeakKeyDictionary()


def rotation_of(function: Any) -> Rotation | str:
    """The function's rotation, or why it cannot be determined."""
    if not _is_rotary(function):
        return "its name now refers to another function"
    uses = list(reachable_functions(object, [function]))
    codes = tuple(f.__code__ for f in uses)
    if _probed.get(function, ((), ""))[0] != codes:
        rotation = _identify_by_running(function)
        if isinstance(rotation, Rotation):
            rotation = _unproven(uses) or rotation
        _probed[function] = codes, rotation
        _rotations.pop(function, None)
    rotation = _probed[function][1]
    if isinstance(rotation, Rotation):
        _rotations[function] = rotation
    return rotation


def _unproven(uses: list[FunctionType]) -> str:
    """Why one run does not show what these functions do in other calls; empty if it does.

    They may take a branch that the run did not take, or read a value that changes later.
    """
    for function in uses:
        instructions = list(_instructions(function.__code__))
        if any(map(_branches, instructions)):
            return BRANCHES
        names = {i.argval for i in instructions if i.opname == "LOAD_GLOBAL"}
        held = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
        for name, value in {**held, **closure_values(function)}.items():
            if not isinstance(value, FIXED):
                return f"it reads {name}, whose changes cannot be detected"
    return ""


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Instructions of the code and of code defined inside it, such as generators."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _branches(i: dis.Instruction) -> bool:
    """Whether an instruction compares or jumps, except for jumps on an omitted argument."""
    return i.opname == "COMPARE_OP" or ("_IF_" in i.opname and not i.opname.endswith("NONE"))


def _identify_by_running(function: FunctionType) -> Rotation | str:
    parameters = inspect.signature(function).parameters
    first, rest = list(parameters)[:4], list(parameters.values())[4:]
    if first[2:] != ["cos", "sin"] or any(p.default is p.empty for p in rest):
        return "it does not take q, k, cos, sin"
    given = parameters.get("unsqueeze_dim")
    dims = (given.default, 2) if given else (-2,)
    if given and given.default not in (1, 2):
        return f"its unsqueeze_dim is {given.default}, not 1 or 2"
    no_autocast = torch.autocast("cpu", enabled=False)
    try:
        with undisturbed(), quiet("cpu"), torch.device("cpu"), no_autocast:
            candidates = (replace(c, dim=dims[0]) for c in CANDIDATES)
            rotation = next((c for c in candidates if _agree(function, c, dims, 8, F64, F64)), None)
            return UNKNOWN if rotation is None else _proven(function, rotation, dims)
    except _Unrunnable as error:
        return f"running it raised {error}"


class _Unrunnable(Exception):
    """The error that a model's function raised."""


@contextmanager
def _theirs() -> Iterator[None]:
    """Raises _Unrunnable for an error of the model's function; wrap no code of ours."""
    try:
        yield
    except Exception as error:
        raise _Unrunnable(type(error).__name__) from error


def _proven(function: FunctionType, rotation: Rotation, dims: tuple[int, ...]) -> Rotation | str:
    """`rotation` with the fields that further runs determine, or why it does not match."""
    example = _arguments(rotation, 8, rotation.dim, BF16, F32)
    transposed = example[0].transpose(-3, -2).contiguous().transpose(-3, -2)
    with torch.no_grad(), _theirs():
        results, view = function(*example), function(transposed, *example[1:])
        with torch.autocast("cpu", BF16):
            cast = [y.dtype for y in function(*example)] != [y.dtype for y in results]
    back = results[0].dtype == BF16
    rotation = replace(rotation, back=back, cast=cast, keeps=not view[0].is_contiguous())
    for table, dtype in product(FLOATS, FLOATS):
        if not _agree(function, rotation, dims, 8, dtype, table):
            return UNKNOWN
    part = replace(rotation, partial=True)
    return part if _agree(function, part, dims, 14, F32, F32) else rotation


def _arguments(
    rotation: Rotation, width: int, dim: int, dtype: torch.dtype, table: torch.dtype
) -> tuple[Tensor, ...]:
    """Random q, k, cos and sin. The table has 8 elements, all different."""
    draw = torch.Generator().manual_seed(0)
    places = (5,) if rotation.dim == -2 else (2, 5)
    at = dim % (len(places) + 2)
    entries = 4 if rotation.table in (_twice, _neighbours) else 8
    heads = (drawn(draw, *places[:at], h, *places[at:], width) for h in (3, 2))
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
    exact = list(
        _results(
            partial(rotation.by, rotary_embedding_reference, dim=dim), [a.double() for a in args]
        )
    )
    with _theirs():
        try:
            theirs = list(_results(partial(function, **kwargs), args))
        except (RuntimeError, ValueError, IndexError, TypeError):  # wrong width for the function
            return False
    ours = list(_results(partial(rotation.by, rotary_embedding, dim=dim), args))
    coarse = max(torch.finfo(dtype).eps, torch.finfo(F32).eps)  # some functions compute in float32
    return len(theirs) == len(ours) and all(
        original.shape == fused.shape
        and (original.dtype == fused.dtype or dtype == F64)
        and within(original, reference, 8 * coarse)
        and within(fused, reference, 8 * coarse)
        for original, fused, reference in zip(theirs, ours, exact, strict=True)
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
