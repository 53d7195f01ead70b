"""Rewrites a layer's forward where fused functions can replace its lines.

All kinds of sites in the lines (a sum and its norm, a gated product, a linear's activation) are
rewritten together: a layer gets one new class, whose forward contains all of them.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusedops.nn import QuantizedLinear
from fusedops.patching.core.swap import (
    Unswappable,
    fused_class,
    original_class,
    subclass,
    swap,
    version,
)
from fusedops.patching.lines.reader import Names
from fusedops.patching.lines.source import Unreadable, innermost, parse, rebuild
from fusedops.patching.modules.activation import function_of, looks_like_an_activation
from fusedops.patching.modules.linear import is_linear
from fusedops.patching.modules.norm.site import looks_like_a_norm
from fusedops.patching.report import PatchReport, Site

__all__ = ["Kind", "kinds_in", "lines_of", "patch_layers"]

CONTAINERS = nn.Module.forward, nn.Sequential.forward  # the first is ModuleList's

# (child's name, its role), for the children that matter to rewriting
Roles = frozenset[tuple[str, str]]
Lines = dict[str, list[Any]]  # each kind's finds, by the kind's name


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of site in the lines of a forward.

    rank: the order in which kinds rewrite the same lines. asks: the role of a child that a layer
    with such a site must have. rewrite: changes a forward's tree and returns its finds. helpers:
    the functions that the new lines call, by name; each gets the layer first. sites: turns the
    finds into sites of one module, and notes. unread: the site to report if the source cannot be
    read.
    """

    name: str
    rank: int
    asks: str
    rewrite: Callable[[Any, Names], list[Any]]
    helpers: Mapping[str, Callable]
    sites: Callable[[str, nn.Module, list[Any]], tuple[list[Site], list[str]]]
    unread: Callable[[str, nn.Module, str], Site | None]


def patch_layers(model: nn.Module, kinds: Sequence[Kind], report: PatchReport) -> None:
    """Rewrites every forward that has a site. Run after norms, linears and activations."""
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        roles, original = _roles(module), original_class(module)
        asked = {role for _, role in roles}
        own = [kind for kind in kinds if kind.asks in asked]
        if own and original.forward not in CONTAINERS:
            _patch_layer(path, module, own, roles, report)


def _patch_layer(
    path: str, module: nn.Module, kinds: list[Kind], roles: Roles, report: PatchReport
) -> None:
    original = original_class(module)
    both = sorted({*kinds, *_known_kinds(module)}, key=lambda kind: kind.rank)
    lines = _find(original, roles, both)
    if isinstance(lines, str):
        unread = (kind.unread(path, module, lines) for kind in kinds)
        report.skipped += [site for site in unread if site]
        return
    found = [kind.sites(path, module, lines[kind.name]) for kind in kinds]
    sites = [site for some, _ in found for site in some]
    if any(site.now for site in sites):
        reason = _swap(module, kinds, both, roles)
        sites = [replace(site, now="", reason=reason) if reason else site for site in sites]
    report.fused += [site for site in sites if site.now]
    report.skipped += [site for site in sites if not site.now]
    notes = dict.fromkeys(note for _, some in found for note in some)
    report.notes += [note for note in notes if note not in report.notes]


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
    known = {kind.name for kind in fused._fusedops.kinds}
    return "" if asked <= known else "another library has wrapped its class"


def _known_kinds(module: nn.Module) -> tuple[Kind, ...]:
    """The kinds that the module's forward was rewritten for, even if they are switched off."""
    fused = fused_class(module)
    return () if fused is None else fused._fusedops.kinds


def lines_of(layer: nn.Module) -> frozenset[str]:
    """The kinds that a rewritten forward currently runs fused."""
    state = getattr(layer, "_fusedops", None)
    return frozenset() if state is None else state.lines


def kinds_in(module: nn.Module) -> list[str]:
    """The kinds of sites in a rewritten forward that are switched on."""
    kinds = _known_kinds(module)
    lines = _find(original_class(module), _roles(module), kinds)
    found = {} if isinstance(lines, str) else lines
    return [kind.name for kind in kinds if kind.name in lines_of(module) and found.get(kind.name)]


def _roles(module: nn.Module) -> Roles:
    roles = [(name, _role(name, child)) for name, child in module.named_children()]
    own = (name for name, value in vars(module).items() if function_of(value))
    return frozenset([*((n, role) for n, role in roles if role), *((n, "activation") for n in own)])


def _role(name: str, module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return ""
    if isinstance(module, nn.Dropout):
        return "dropout"
    if getattr(module, "inplace", False) is True:
        return "inplace"
    if is_linear(module) or isinstance(module, QuantizedLinear):
        return "linear"
    if looks_like_an_activation(name, module):
        return "activation"
    return "norm" if looks_like_a_norm(module) or _wraps_norms(module) else ""


def _wraps_norms(module: nn.Module) -> bool:
    """Whether the module contains only norms, like PEFT's ModulesToSaveWrapper."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or next(module.children(), None) is None:
        return False
    leaves = (m for m in module.modules() if next(m.children(), None) is None)
    return all(looks_like_a_norm(leaf) for leaf in leaves)


# class -> (its version, kinds, its children's roles) -> the finds, or why it cannot be read
_known: "WeakKeyDictionary[type, dict[Hashable, Lines | str]]" = WeakKeyDictionary()


def _find(original: type[nn.Module], roles: Roles, kinds: Sequence[Kind]) -> Lines | str:
    names = tuple(kind.name for kind in kinds)
    known, key = _known.setdefault(original, {}), (version(original), names, roles)
    if key not in known:
        try:
            known[key] = _rewrite(original, roles, kinds)[1]
        except (Unreadable, Unswappable) as why:
            known[key] = str(why)
    return known[key]


def _rewrite(
    original: type[nn.Module], roles: Roles, kinds: Sequence[Kind]
) -> tuple[Callable, Lines]:
    """The class's forward, rewritten, and the finds in it."""
    function = innermost(original)
    tree = parse(function)
    if not (tree.args.posonlyargs or tree.args.args):
        raise Unreadable("its forward has no self argument")
    names = Names(dict(roles), functools.partial(_global, function))
    lines = {kind.name: kind.rewrite(tree, names) for kind in kinds}
    helpers = {name: helper for kind in kinds for name, helper in kind.helpers.items()}
    return rebuild(tree, original, helpers), lines


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
        forward = _rewrite(original, roles, kinds)[0]
        return {"forward": forward}, {"kinds": tuple(kinds), "lines": frozenset(names)}

    return subclass(original, (names, roles), build)
