"""Rewrites a layer's forward where fused functions can replace its lines.

All kinds of sites in the lines (a sum and its norm, a gated product, a linear's activation, a
rotary function's call) are rewritten together: a layer gets one new class, whose forward, and the
methods that it uses, contain all of them. An nn.Sequential has no such lines: its new forward takes
some of its modules together.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusedops.nn import QuantizedLinear
from fusedops.patching.core.source import Unreadable
from fusedops.patching.core.swap import (
    Unswappable,
    fused_class,
    original_class,
    subclass,
    swap,
    version,
)
from fusedops.patching.core.thresholds import inductor_fuses
from fusedops.patching.lines.code import CALL, FunctionCopy, Lines, Roles, is_fused, read_code
from fusedops.patching.lines.reader import Names
from fusedops.patching.modules.activation import (
    function_of,
    learn_function,
    looks_like_an_activation,
)
from fusedops.patching.modules.linear import is_linear
from fusedops.patching.modules.norm.site import looks_like_a_norm
from fusedops.patching.report import PatchReport, Site

__all__ = [
    "OFF",
    "Kind",
    "Outcome",
    "fuses",
    "is_written",
    "kinds_in",
    "lines_of",
    "patch_layers",
    "role_of",
    "roles_of",
]

OFF = "its layer no longer runs this fused"
CONTAINERS = nn.Module.forward, nn.Sequential.forward  # the first is ModuleList's


@dataclass(frozen=True)
class Outcome:
    """What becomes of one find in a module.

    was: its source, or a class. now: the fused function, empty if the lines stay. reason: why they
    stay, or a remark. child: the submodule that the site is named after, if there is one.
    """

    was: str
    now: str = ""
    reason: str = ""
    child: str = ""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of site in the lines of a forward.

    rank: the order in which kinds rewrite the same lines. needs: a layer with such a site has a
    child with one of these roles; if empty, it is a class of somebody's own, in Python. rewrite:
    changes a forward's tree and returns its finds. helpers: the functions that the new lines call,
    by name; each gets the layer first. judge: fuses one find in a module if possible; None if the
    find is no site of this kind. unread: whether to report a module whose source cannot be read,
    given its children's roles and its class. reported: the kind's name in the report. without: the
    note on a class without a find, if it is worth one. callees: whether rewrite also changes
    functions that the forward calls. sequence: the forward of an nn.Sequential with such sites, and
    pairs: the finds in one.
    """

    name: str
    rank: int
    needs: tuple[str, ...]
    rewrite: Callable[[Any, Names], list[Any]]
    helpers: Mapping[str, Callable]
    judge: Callable[[nn.Module, Any], Outcome | None]
    unread: Callable[[list[str], type[nn.Module]], bool]
    reported: str
    without: str = ""
    callees: bool = False
    sequence: Callable | None = None
    pairs: Callable[[nn.Sequential], list[Any]] = lambda module: []


def patch_layers(model: nn.Module, kinds: Sequence[Kind], report: PatchReport) -> None:
    """Rewrites every forward that has a site. Run after norms, linears and activations."""
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        roles, original, written = roles_of(module), original_class(module), is_written(module)
        present = {role for _, role in roles}
        possible = [kind for kind in kinds if present.intersection(kind.needs)]
        possible += [kind for kind in kinds if written and not kind.needs]
        if possible and original.forward not in CONTAINERS:
            _patch_layer(path, module, possible, roles, report)
        elif original.forward is nn.Sequential.forward:
            for kind in (kind for kind in possible if kind.sequence):
                _patch_sequence(path, module, kind, report)


def is_written(module: nn.Module) -> bool:
    """Whether the module's class is somebody's own, in Python."""
    original = original_class(module)
    home = str(original.__module__).partition(".")[0]
    is_script = isinstance(module, torch.jit.ScriptModule)
    return (
        home not in ("torch", "fusedops") and original.forward not in CONTAINERS and not is_script
    )


def _patch_layer(
    path: str, module: nn.Module, kinds: list[Kind], roles: Roles, report: PatchReport
) -> None:
    original = original_class(module)
    both = sorted({*kinds, *_known_kinds(module)}, key=lambda kind: kind.rank)
    lines = _find(original, roles, both)
    if isinstance(lines, str):
        child_roles = [role for _, role in roles]
        unread = (kind.reported for kind in kinds if kind.unread(child_roles, original))
        report.skipped += [Site(path, kind, original.__name__, reason=lines) for kind in unread]
        return
    outcomes = [(kind, kind.judge(module, find)) for kind in kinds for find in lines[kind.name]]
    sites = [_site(path, kind, outcome) for kind, outcome in outcomes if outcome]
    if any(site.now for site in sites):
        reason = _swap(module, kinds, both, roles)
        sites = [replace(site, now="", reason=reason) if reason else site for site in sites]
    report.fused += [site for site in sites if site.now]
    report.skipped += [site for site in sites if not site.now]
    without = (kind.without for kind in kinds if kind.without and not lines[kind.name])
    notes = [note.format(original.__name__) for note in without]
    report.notes += [note for note in notes if note not in report.notes]


def _patch_sequence(path: str, module: Any, kind: Kind, report: PatchReport) -> None:
    outcomes = [kind.judge(module, find) for find in kind.pairs(module)]
    sites = [_site(path, kind, outcome) for outcome in outcomes if outcome]
    if not any(site.now for site in sites):
        return
    methods, fields = {"forward": kind.sequence}, {"lines": frozenset((kind.name,))}
    try:
        swap(module, lambda cls: subclass(cls, ("sequence", kind), lambda: (methods, fields)))
    except Unswappable:
        return  # its linears are sites of their own
    if type(module) is fused_class(module):
        report.fused += [site for site in sites if site.now]


def _site(path: str, kind: Kind, outcome: Outcome) -> Site:
    where = ".".join(filter(None, (path, outcome.child)))
    return Site(where, kind.reported, outcome.was, outcome.now, outcome.reason)


def _swap(module: nn.Module, kinds: Sequence[Kind], both: Sequence[Kind], roles: Roles) -> str:
    """Gives the module its new forward. Returns why it cannot; empty on success."""
    on = lines_of(module)
    try:
        swap(module, functools.partial(_fused, kinds=both, roles=roles))
    except Unswappable as why:
        return str(why)
    fused: Any = fused_class(module)
    if type(module) is fused:
        return ""
    asked = {kind.name for kind in kinds}
    vars(module)["_fusedops"] = replace(fused._fusedops, lines=on | asked)
    rewritten = {kind.name for kind in fused._fusedops.kinds}
    return "" if asked <= rewritten else "another library has wrapped its class"


def _known_kinds(module: nn.Module) -> tuple[Kind, ...]:
    """The kinds that the module's forward was rewritten for, even if they are switched off."""
    fused = fused_class(module)
    return () if fused is None else fused._fusedops.kinds


def fuses(layer: nn.Module, kind: str, x: Any) -> bool:
    """Whether a rewritten forward may run this kind's fused function for x now."""
    if inductor_fuses(x):  # first, as torch.compile guards every attribute that is read
        return False
    state = getattr(layer, "_fusedops", None)
    return state is not None and kind in state.lines


def lines_of(layer: nn.Module) -> frozenset[str]:
    """The kinds that a rewritten forward currently runs fused."""
    state = getattr(layer, "_fusedops", None)
    return frozenset() if state is None else state.lines


def kinds_in(module: nn.Module) -> list[str]:
    """The kinds of sites in a rewritten forward that are switched on."""
    if original_class(module).forward in CONTAINERS:
        return sorted(lines_of(module))
    kinds = _known_kinds(module)
    lines = _find(original_class(module), roles_of(module), kinds)
    by_kind = {} if isinstance(lines, str) else lines
    on = lines_of(module)
    return [k.name for k in kinds if k.name in on and any(map(is_fused, by_kind.get(k.name, ())))]


def roles_of(module: nn.Module) -> Roles:
    roles = [(name, role_of(name, child)) for name, child in module.named_children()]
    for value in vars(module).values():
        learn_function(value)
    functions = ((name, "activation") for name, value in vars(module).items() if function_of(value))
    return frozenset([*((n, role) for n, role in roles if role), *functions])


def role_of(name: str, module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return ""
    if isinstance(module, nn.Dropout):
        return "dropout"
    if isinstance(module, nn.Softmax):
        return "softmax"
    if getattr(module, "inplace", False) is True:
        return "inplace"
    if _computes_linear(module):
        return "linear"
    if _computes_linear(getattr(module, "base_layer", None)):
        return "adapter"  # PEFT's
    if looks_like_an_activation(name, module):
        return "activation"
    return "norm" if looks_like_a_norm(module) or _wraps_norms(module) else ""


def _computes_linear(module: Any) -> bool:
    return isinstance(module, QuantizedLinear) or (
        isinstance(module, nn.Module) and is_linear(module)
    )


def _wraps_norms(module: nn.Module) -> bool:
    """Whether the module contains only norms, like PEFT's ModulesToSaveWrapper."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or next(module.children(), None) is None:
        return False
    leaves = (m for m in module.modules() if next(m.children(), None) is None)
    return all(looks_like_a_norm(leaf) for leaf in leaves)


# class -> (its version, kinds, its children's roles) -> the finds, or why it cannot be read
_finds: "WeakKeyDictionary[type, dict[Hashable, Lines | str]]" = WeakKeyDictionary()


def _find(original: type[nn.Module], roles: Roles, kinds: Sequence[Kind]) -> Lines | str:
    names = tuple(kind.name for kind in kinds)
    cached, key = _finds.setdefault(original, {}), (version(original), names, roles)
    if key not in cached:
        try:
            cached[key] = _rewrite(original, roles, kinds)[1]
        except (Unreadable, Unswappable) as why:
            cached[key] = str(why)
    return cached[key]


def _rewrite(
    original: type[nn.Module], roles: Roles, kinds: Sequence[Kind]
) -> tuple[dict[str, Callable], Lines]:
    """The class's methods that change, and the finds in its code."""
    code = read_code(original, roles, kinds)
    helpers = {name: helper for kind in kinds for name, helper in kind.helpers.items()}
    return code.build(original, {**helpers, CALL: _called}), code.lines


def _called(layer: nn.Module, copy: FunctionCopy, function: Any, *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), called by a rewritten forward; its copy if it is that function."""
    if function is copy.function and lines_of(layer):
        return copy.run(layer, *args, **kwargs)
    return function(*args, **kwargs)


def _fused(original: type[nn.Module], kinds: Sequence[Kind], roles: Roles) -> type:
    names = tuple(kind.name for kind in kinds)

    def build() -> tuple[dict, dict]:
        methods = _rewrite(original, roles, kinds)[0]
        return methods, {"kinds": tuple(kinds), "lines": frozenset(names)}

    return subclass(original, (names, roles), build)
