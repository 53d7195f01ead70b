"""Rewrites a layer's forward where fused functions can replace its lines.

All kinds of sites in the lines (a sum and its norm, a gated product, a linear's activation, a
rotary function's call) are rewritten together: a layer gets one new class, whose forward, and the
methods that it uses, contain all of them. An nn.Sequential has no such lines: its new forward takes
some of its modules together.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusedops.nn import QuantizedLinear
from fusedops.patching.core.source import Unreadable, innermost, parse, rebuild, wrappers_of
from fusedops.patching.core.swap import (
    Unswappable,
    fused_class,
    original_class,
    subclass,
    swap,
    version,
)
from fusedops.patching.core.thresholds import inductor_fuses
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
    "Lines",
    "Outcome",
    "Roles",
    "fuses",
    "kinds_in",
    "lines_of",
    "names_in",
    "patch_layers",
    "role_of",
    "roles_of",
    "unfused_lines",
]

OFF = "its layer no longer runs this fused"
CONTAINERS = nn.Module.forward, nn.Sequential.forward  # the first is ModuleList's

# (child's name, its role), for the children that matter to rewriting
Roles = frozenset[tuple[str, str]]
Lines = dict[str, list[Any]]  # each kind's finds, by the kind's name


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
    child with one of these roles. rewrite: changes a forward's tree and returns its finds. helpers:
    the functions that the new lines call, by name; each gets the layer first. judge: fuses one find
    in a module if possible; None if it is a site of another kind. unread: whether to report a
    module whose source cannot be read, given its children's roles and its class. reported: the
    kind's name in the report. without: the note on a class without a find, if it is worth one.
    in_methods: whether it also rewrites the methods that a forward uses. sequence: the forward of
    an nn.Sequential with such sites, and pairs: the finds in one.
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
    in_methods: bool = False
    sequence: Callable | None = None
    pairs: Callable[[nn.Sequential], list[Any]] = lambda module: []


def patch_layers(model: nn.Module, kinds: Sequence[Kind], report: PatchReport) -> None:
    """Rewrites every forward that has a site. Run after norms, linears and activations."""
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        roles, original = roles_of(module), original_class(module)
        present = {role for _, role in roles}
        possible = [kind for kind in kinds if present.intersection(kind.needs)]
        if possible and original.forward not in CONTAINERS:
            _patch_layer(path, module, possible, roles, report)
        elif original.forward is nn.Sequential.forward:
            for kind in (kind for kind in possible if kind.sequence):
                _patch_sequence(path, module, kind, report)


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
    return [kind.name for kind in kinds if kind.name in lines_of(module) and by_kind.get(kind.name)]


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
    """The class's forward and the methods that it uses, rewritten, and the finds in them."""
    trees, lines = unfused_lines(original, roles, kinds)
    helpers = {name: helper for kind in kinds for name, helper in kind.helpers.items()}
    forward, *methods = trees
    rewritten = {"forward": rebuild(trees[forward], forward, helpers, wrappers_of(original))}
    for method in methods:
        rewritten[method.__name__] = rebuild(trees[method], method, helpers)
    return rewritten, lines


def unfused_lines(
    original: type[nn.Module], roles: Roles, kinds: Sequence[Kind]
) -> tuple[dict[FunctionType, ast.FunctionDef], Lines]:
    """The class's forward, and those methods that it uses that have sites, and these sites.

    Calls of helpers are in place of the sites in their trees.
    """
    forward = innermost(original)
    tree = parse(forward)
    if not (tree.args.posonlyargs or tree.args.args):
        raise Unreadable("its forward has no self argument")
    trees = {forward: tree}
    methods = dict(_methods(original, tree, set())) if any(k.in_methods for k in kinds) else {}
    names = names_in(forward, roles)
    lines = {kind.name: kind.rewrite(tree, names) for kind in kinds}
    for method, method_tree in methods.items():
        names = names_in(method, roles)
        more = {k.name: k.rewrite(method_tree, names) for k in kinds if k.in_methods}
        if any(more.values()):
            trees[method] = method_tree
        for name, finds in more.items():
            lines[name] += finds
    return trees, lines


def _methods(
    original: type[nn.Module], tree: ast.FunctionDef, seen: set[str]
) -> Iterator[tuple[FunctionType, ast.FunctionDef]]:
    """The plain methods that a method's tree names, and those that they name in turn."""
    owner = next((a.arg for a in (*tree.args.posonlyargs, *tree.args.args)), "")
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == owner:
                method = inspect.getattr_static(original, attr, None)
                if attr in seen or attr == "forward" or not isinstance(method, FunctionType):
                    continue
                seen.add(attr)
                if method.__module__.partition(".")[0] == "torch" or method.__name__ != attr:
                    continue
                try:
                    method_tree = parse(method)
                except Unreadable:
                    continue
                if not method_tree.decorator_list:
                    yield method, method_tree
                    yield from _methods(original, method_tree, seen)


def names_in(function: Any, roles: Roles) -> Names:
    """The meaning of the names in a function's code; roles: those of its module's children."""
    return Names(dict(roles), functools.partial(_global, function))


def _global(function: Any, dotted: str) -> object:
    """The value of a dotted name in the function; None if it has none there."""
    head, *rest = dotted.split(".")
    value = function.__globals__.get(head)
    for name in rest:
        value = inspect.getattr_static(value, name, None)
    return value


def _fused(original: type[nn.Module], kinds: Sequence[Kind], roles: Roles) -> type:
    names = tuple(kind.name for kind in kinds)

    def build() -> tuple[dict, dict]:
        methods = _rewrite(original, roles, kinds)[0]
        return methods, {"kinds": tuple(kinds), "lines": frozenset(names)}

    return subclass(original, (names, roles), build)
