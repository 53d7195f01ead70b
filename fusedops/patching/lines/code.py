"""Reads the code that a class's forward runs: methods, and functions that it calls directly.

A method with sites becomes a method of the fused class. A plain function cannot, so its callers
call a copy of it, which gets the module as its first argument:

    y = attention(q, k, v)      y = _fusedops_call(self, _fusedops_copy_0, attention, q, k, v)
"""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn

from fusedops.patching.core.probing import names_of
from fusedops.patching.core.source import Unreadable, innermost, parse, rebuild, rebuild_function
from fusedops.patching.lines.reader import Names, Reader

__all__ = [
    "CALL",
    "Code",
    "FunctionCopy",
    "Lines",
    "Roles",
    "add_layer",
    "is_fused",
    "names_in",
    "read_code",
]

CALL, COPY, LAYER = "_fusedops_call", "_fusedops_copy", "_fusedops_layer"
FOLLOWED = {"scaled_dot_product_attention", "softmax"}  # names in functions of other files

# (child's name, its role), for the children that matter to rewriting
Roles = frozenset[tuple[str, str]]
Lines = dict[str, list[Any]]  # each kind's finds, by the kind's name


@dataclass(frozen=True)
class FunctionCopy:
    """A function, and its copy with helpers in place of sites, which gets the module first."""

    function: FunctionType
    run: Callable[..., Any]


@dataclass
class Code:
    """What `read_code` finds in a class.

    trees: each function that was read, with calls of helpers in place of sites. lines: those sites.
    unread: the functions that could not be read, and why. methods: the trees that the fused class
    has as methods, by name. copies: the names of functions' copies, in the order to build them.
    """

    trees: dict[FunctionType, ast.FunctionDef] = field(default_factory=dict)
    lines: Lines = field(default_factory=dict)
    unread: dict[FunctionType, str] = field(default_factory=dict)
    methods: dict[str, FunctionType] = field(default_factory=dict)
    copies: dict[FunctionType, str] = field(default_factory=dict)

    def build(
        self, original: type[nn.Module], helpers: Mapping[str, object]
    ) -> dict[str, Callable[..., Any]]:
        """The fused class's methods. helpers: what the new lines call, by name."""
        more = dict(helpers)
        for function, name in self.copies.items():
            more[name] = FunctionCopy(
                function, rebuild_function(self.trees[function], function, more)
            )
        methods: dict[str, Callable[..., Any]] = {
            name: rebuild_function(self.trees[function], function, more)
            for name, function in self.methods.items()
        }
        return methods | {"forward": rebuild(self.trees[innermost(original)], original, more)}


def read_code(original: type[nn.Module], roles: Roles, kinds: Sequence[Any]) -> Code:
    """The class's forward and what it calls, rewritten for kinds of sites.

    kinds: `lines/layer.py`'s; those with `callees` rewrite other functions than the forward too.
    """
    forward = innermost(original)
    tree = parse(forward)
    if not (tree.args.posonlyargs or tree.args.args):
        raise Unreadable("its forward has no self argument")
    reading = _CodeReader(original, roles, kinds)
    reading.visit(forward, tree, roles, kinds)
    return reading.code


class _CodeReader:
    def __init__(self, original: type[nn.Module], roles: Roles, kinds: Sequence[Any]) -> None:
        self.original, self.roles = original, roles
        self.deep = [kind for kind in kinds if kind.callees]
        self.code = Code(lines={kind.name: [] for kind in kinds})

    def visit(
        self, function: FunctionType, tree: ast.FunctionDef, roles: Roles, kinds: Sequence[Any]
    ) -> bool:
        """Rewrites the functions that a function calls, then the function. True if one changed."""
        self.code.trees[function] = tree
        names = names_in(function, roles)
        changed = self._visit_callees(function, tree, Reader(tree, names))
        for kind in kinds:
            finds = kind.rewrite(tree, names)
            self.code.lines[kind.name] += finds
            changed |= any(map(is_fused, finds))
        return changed

    def _visit_callees(self, caller: FunctionType, tree: ast.FunctionDef, read: Reader) -> bool:
        changed = False
        for node, value, name in list(self._references(tree, read)):
            raw: Any = getattr(value, "__func__", value)
            function = inspect.unwrap(raw) if callable(raw) else None
            if not isinstance(function, FunctionType) or not _is_followed(function, caller):
                continue
            if function not in self.code.trees and function not in self.code.unread:
                method = "" if isinstance(value, staticmethod | classmethod) else name
                fits = function is raw and not isinstance(value, classmethod)
                self._visit_function(function, method, fits)
            copy = self.code.copies.get(function)
            if copy and isinstance(node, ast.Call):
                owner, copied = ast.Name(read.self_name, ast.Load()), ast.Name(copy, ast.Load())
                node.args[:0] = [owner, copied, node.func]
                node.func = ast.copy_location(ast.Name(CALL, ast.Load()), node.func)
                changed = True
        return changed

    def _visit_function(self, function: FunctionType, method: str, fits: bool) -> None:
        """fits: whether the class may get a rewritten method, or the caller a copy."""
        try:
            tree = parse(function)
        except Unreadable as why:
            self.code.unread[function] = str(why)
            return
        if method and not (tree.args.posonlyargs or tree.args.args):
            return
        if not method:
            add_layer(tree)
        changed = self.visit(
            function, tree, self.roles if method else frozenset(), self.deep if fits else ()
        )
        if changed and method:
            self.code.methods[method] = function
        elif changed:
            self.code.copies[function] = f"{COPY}_{len(self.code.copies)}"

    def _references(
        self, tree: ast.FunctionDef, read: Reader
    ) -> Iterator[tuple[ast.AST, object, str]]:
        """(node, value, name): methods that the code names, and functions that it calls."""
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (
                    owner == read.self_name
                ):
                    yield node, inspect.getattr_static(self.original, name, None), name
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == read.self_name:
                    yield node, inspect.getattr_static(self.original, name, None), name
                case ast.Call(func=func):
                    yield node, read.meaning(func), ""


def add_layer(tree: ast.FunctionDef) -> None:
    """Gives a plain function the module as its first argument."""
    (tree.args.posonlyargs or tree.args.args).insert(0, ast.arg(LAYER))
    ast.fix_missing_locations(tree)


def _is_followed(function: FunctionType, caller: FunctionType) -> bool:
    """Whether a function is in its caller's file, or may compute attention."""
    if function.__module__ == caller.__module__:
        return True
    home = str(function.__module__).partition(".")[0]
    return home not in ("torch", "fusedops") and not FOLLOWED.isdisjoint(names_of(function))


def is_fused(find: Any) -> bool:
    """Whether a find's lines were rewritten."""
    return not getattr(find, "reason", "")


def names_in(function: Any, roles: Roles) -> Names:
    """The meaning of the names in a function's code; roles: those of its module's children."""
    meaning = functools.partial(_global, function)
    return Names(dict(roles), meaning, function.__code__.co_filename)


def _global(function: Any, dotted: str) -> object:
    """The value of a dotted name in the function; None if it has none there."""
    head, *rest = dotted.split(".")
    value = function.__globals__.get(head)
    for name in rest:
        value = inspect.getattr_static(value, name, None)
    return value
