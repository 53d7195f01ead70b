"""Finds calls in a model's own code that have kernels but stay with torch.

Attention, cross entropy and GELU: functions of torch, modules, and code that writes them out. Each
is a row in the report, with the line that calls it and the reason.
"""

import ast
import inspect
import os
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from fusedops.patching.core.probing import names_of
from fusedops.patching.core.source import Unreadable
from fusedops.patching.core.swap import Unswappable, original_class, version
from fusedops.patching.lines.activated_linear import EPILOGUE, pairs
from fusedops.patching.lines.activated_linear import WRITTEN as JOINED
from fusedops.patching.lines.attention.rewrite import SDPA_CALL, WRITTEN, AttentionLines
from fusedops.patching.lines.code import Code, Lines, Roles, is_fused, names_in, read_code
from fusedops.patching.lines.layer import Kind, is_written, roles_of
from fusedops.patching.lines.mlp import MLP
from fusedops.patching.lines.reader import Reader, dotted, loads, stores
from fusedops.patching.modules.activation import (
    Activation,
    identified,
    looks_like_an_activation,
)
from fusedops.patching.report import PatchReport, Site

__all__ = ["Reached", "find_plain_calls"]

FUNCTIONS: dict[Any, tuple[str, str]] = {
    F.scaled_dot_product_attention: ("attention", "F.scaled_dot_product_attention"),
    F.multi_head_attention_forward: ("attention", "F.multi_head_attention_forward"),
    F.cross_entropy: ("loss", "F.cross_entropy"),
    nn.CrossEntropyLoss: ("loss", "nn.CrossEntropyLoss"),
    F.gelu: ("activation", "F.gelu"),
}
# What shows that such a call ran: a builtin function, or the code of a function in Python.
RUNS = {
    name: getattr(function, "__code__", function)
    for name, function in {
        "F.scaled_dot_product_attention": F.scaled_dot_product_attention,
        "F.multi_head_attention_forward": F.multi_head_attention_forward,
        "F.cross_entropy": F.cross_entropy,
        "nn.CrossEntropyLoss": F.cross_entropy,
        "F.gelu": F.gelu,
    }.items()
}
SDPA = "scaled_dot_product_attention"
MODULE_CALL = nn.Module._call_impl.__code__
SOFTMAX = F.softmax, torch.softmax
IN_LINES = SDPA_CALL, WRITTEN
PRODUCTS = torch.matmul, torch.bmm, torch.einsum
WHY = {
    SDPA_CALL: "patch does not replace it here;"
    " fusedops.functional.scaled_dot_product_attention takes the same arguments",
    "F.multi_head_attention_forward": "patch does not replace torch's own attention modules",
    "nn.MultiheadAttention": "patch does not replace torch's own attention modules",
    WRITTEN: "its lines have a form that is not read;"
    " fusedops.functional.attention computes it in one pass",
    "F.cross_entropy": "patch replaces it in the forward that calls the head;"
    " fusedops.functional.cross_entropy takes the same arguments",
    "nn.CrossEntropyLoss": "patch replaces it in the forward that calls the head;"
    " fusedops.nn.CrossEntropyLoss takes the same arguments",
    "F.gelu": "patch fuses an activation only where it directly follows a linear",
    "GELU": "patch does not recognise an activation that is written out within other code",
}
IN_SEQUENTIAL = "in an nn.Sequential, patch fuses an activation only right after a linear"


@dataclass(frozen=True)
class PlainCall:
    """A call in a class's code. name: of the function or of what is written out, as in `WHY`.

    kind, was, reason: as in `Site`. file, lines: where it stands.
    """

    name: str
    kind: str
    was: str
    reason: str
    file: str
    lines: range


class _Children(NamedTuple):
    """The names of a module's children, and what they are."""

    roles: Roles
    names: frozenset[str]


class _ClassCode(NamedTuple):
    """The calls in a class's code, and the sites in its forward. unread: why it has none."""

    calls: list[PlainCall]
    lines: Lines
    unread: str = ""


NO_CHILDREN = _Children(frozenset(), frozenset())
Places = dict[tuple[str, str, str], PlainCall]  # by their site's path, kind and text

# class -> (its version, its children, the kinds that patch looks for) -> its code
_codes: "WeakKeyDictionary[type, dict[Hashable, _ClassCode]]" = WeakKeyDictionary()


def find_plain_calls(
    model: nn.Module,
    kinds: Sequence[Kind],
    asked: Iterable[str],
    report: PatchReport,
    losses: Mapping[str, str],
) -> Places:
    """Adds the calls that stay to the report, after all sites are fused.

    kinds: those of lines that patch looked for. asked: the names of patch's arguments that are on.
    losses: why modules compute a cross entropy as before, by path; empty if they have a site.
    Returns those calls that are not a module's own, and the fused ones of the same kind.
    """
    asked = {*asked, "activation"} if "linear" in asked else {*asked}
    sites = [s for s in [*report.fused, *report.skipped] if not s.was.startswith(IN_LINES)]
    reported = {(s.path, s.kind) for s in sites}
    reported |= {(path, "loss") for path, reason in losses.items() if not reason}
    activated = {s.path for s in report.fused if s.now.startswith("linear(activation")}
    calls: Places = {}
    fused: Places = {}
    activations: set[str] = set()
    unread: dict[str, str] = {}
    unjoined: dict[str, Site] = {}  # modules that no forward was seen to call for a fused site
    for path, module in model.named_modules():
        for name, child in module.named_children():
            where = _join(path, name)
            if site := _module_site(where, module, name, child):
                if site.kind == "loss" and not losses.get(where, " "):
                    continue
                unjoined[where] = site
                activations.add(where)
        if isinstance(module, nn.Sequential):
            for pair in pairs(module):
                if _join(path, pair.fc) in activated:
                    unjoined.pop(_join(path, pair.act.name), None)
        if path in activations or not is_written(module):
            continue
        code = _calls_of(module, kinds)
        for call in code.calls:
            if call.kind in ("activation", "mlp") or (path, call.kind) not in reported:
                reason = losses.get(path, "") if call.kind == "loss" else ""
                calls[path, call.kind, call.was] = replace(call, reason=reason or call.reason)
        for call in map(_fused_call, filter(is_fused, code.lines.get("attention", ()))):
            fused[path, call.kind, call.was] = call
        for name in _fused_activations(path, code.lines, activated):
            unjoined.pop(_join(path, name), None)
        if code.unread:
            unread[original_class(module).__name__] = code.unread
    sites = [Site(path, c.kind, c.was, reason=c.reason) for (path, _, _), c in calls.items()]
    report.kept += [site for site in [*sites, *unjoined.values()] if site.kind in asked]
    report.notes += [
        f"{name}: not searched for calls that stay with torch: {why}"
        for name, why in unread.items()
    ]
    return fused | calls


def _fused_call(lines: AttentionLines) -> PlainCall:
    """Attention that runs fused, for `Reached`: any call on its line shows that it ran."""
    at = range(lines.line, lines.line + 1)
    return PlainCall("", "attention", lines.was, "", lines.file, at)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# Modules


def _module_site(path: str, parent: nn.Module, name: str, module: nn.Module) -> Site | None:
    """The row of a module that has a kernel and that no forward was seen to call for it."""
    was = original_class(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return Site(path, "attention", was, reason=WHY["nn.MultiheadAttention"])
    if isinstance(module, nn.CrossEntropyLoss):
        return Site(path, "loss", was, reason=WHY["nn.CrossEntropyLoss"])
    if not looks_like_an_activation(name, module):
        return None
    activation = identified(module)
    if not isinstance(activation, Activation) or not activation.name.startswith("gelu"):
        return None
    in_sequence = isinstance(parent, nn.Sequential)
    return Site(path, "activation", was, reason=IN_SEQUENTIAL if in_sequence else WHY["F.gelu"])


def _fused_activations(path: str, lines: Lines, activated: set[str]) -> Iterator[str]:
    """The names of the activations in a forward that have a row already."""
    for product in lines.get(MLP.name, ()):
        yield product.act.name
    for pair in lines.get(EPILOGUE.name, ()):
        if _join(path, pair.fc) in activated:
            yield pair.act.name


# Calls


def _calls_of(module: nn.Module, kinds: Sequence[Kind]) -> _ClassCode:
    original = original_class(module)
    children = _Children(
        roles_of(module),
        frozenset(name for name, _ in module.named_children()),
    )
    key = version(original), children, tuple(kind.name for kind in kinds)
    cached = _codes.setdefault(original, {})
    if key not in cached:
        cached[key] = _search(original, children, kinds)
    return cached[key]


def _search(original: type[nn.Module], children: _Children, kinds: Sequence[Kind]) -> _ClassCode:
    try:
        code = read_code(original, children.roles, kinds)
    except (Unreadable, Unswappable) as why:
        return _ClassCode([], {}, str(why))
    calls: list[PlainCall] = []
    for function, tree in code.trees.items():
        is_method = inspect.getattr_static(original, function.__name__, None) is not None
        calls += _Code(function, tree, children if is_method else NO_CHILDREN, code).calls()
    calls += [_unread_call(f, why) for f, why in code.unread.items() if SDPA in names_of(f)]
    return _ClassCode(calls, code.lines)


def _unread_call(function: FunctionType, why: str) -> PlainCall:
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    was = f"{SDPA_CALL}, {os.path.basename(file)}:{line}"
    reason = f"in {function.__name__}: {why}"
    return PlainCall(SDPA_CALL, "attention", was, reason, file, range(line, line))


class _Code:
    """One function's tree, and the calls in it that stay."""

    def __init__(
        self, function: FunctionType, tree: ast.FunctionDef, children: _Children, code: Code
    ) -> None:
        self.file = function.__code__.co_filename
        self.attention = next(
            (
                lines.reason
                for lines in code.lines.get("attention", ())
                if lines.reason and (lines.file, lines.line) == (self.file, tree.lineno)
            ),
            "",
        )
        self.read, self.children = Reader(tree, names_in(function, children.roles)), children
        self.nodes = list(ast.walk(self.read.tree))

    def calls(self) -> Iterator[PlainCall]:
        for node in self.nodes:
            match node:
                case ast.Call(func=func):
                    kind, name = _function(self.read.meaning(func))
                    if kind == "activation" and self._is_gate(node):
                        kind = "mlp"
                    if kind and not (kind == "activation" and self._is_of_child(node)):
                        yield self._plain_call(kind, name, node)
        if attention := self._written_attention():
            call = self._plain_call("attention", WRITTEN, attention)
            yield replace(call, reason=self.attention or call.reason)
        for gelu in self._written_gelus(self.read.tree):
            yield self._plain_call("activation", "GELU", gelu)

    def _plain_call(self, kind: str, name: str, node: ast.expr) -> PlainCall:
        line, last = node.lineno, node.end_lineno or node.lineno
        if name == "nn.CrossEntropyLoss":  # made here, called below
            last = self.read.tree.end_lineno or last
        written = " written out" if name in ("GELU", WRITTEN) else ""
        was = f"{name}{written}, {os.path.basename(self.file)}:{line}"
        return PlainCall(name, kind, was, WHY[name], self.file, range(line, last + 1))

    def _is_gate(self, call: ast.Call) -> bool:
        products = (n for n in self.nodes if isinstance(n, ast.BinOp))
        return any(isinstance(p.op, ast.Mult) and call in (p.left, p.right) for p in products)

    def _is_of_child(self, call: ast.Call) -> bool:
        """Whether the argument is the result of a child that is no linear."""
        match call.args:
            case [ast.Call(func=func), *_]:
                child = self.read.submodule(func)
                return child in self.children.names and not self.read.called("linear", call.args[0])
        return False

    def _written_attention(self) -> ast.Call | None:
        """The softmax whose result is multiplied as a matrix."""
        softmaxes = [n for n in self.nodes if isinstance(n, ast.Call) and self._is_softmax(n)]
        if not softmaxes:
            return None
        weights: set[str] = set()
        assignments = [n for n in self.nodes if isinstance(n, ast.Assign)]
        for _ in assignments:  # each pass may carry the weights one assignment further
            for assignment in assignments:
                carries = isinstance(assignment.value, ast.Call) and weights & {*loads(assignment)}
                if carries or any(s in ast.walk(assignment.value) for s in softmaxes):
                    weights |= stores(*assignment.targets)
        for factor in filter(None, map(self._first_factor, self.nodes)):
            inline = next((s for s in softmaxes if s in ast.walk(factor)), None)
            if inline or weights & {*loads(factor)}:
                return inline or softmaxes[0]
        return None

    def _is_softmax(self, call: ast.Call) -> bool:
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "softmax"
        return (
            self.read.meaning(call.func) in SOFTMAX
            or is_method
            or self.read.names.is_a("softmax", self.read.submodule(call.func))
        )

    def _first_factor(self, node: ast.AST) -> ast.AST | None:
        """What a matrix product multiplies from the left; for einsum, all factors."""
        match node:
            case ast.BinOp(left=left, op=ast.MatMult()):
                return left
            case ast.Call(func=func, args=[first, *_]) if self.read.meaning(func) in PRODUCTS:
                return node if self.read.meaning(func) is torch.einsum else first
            case ast.Call(func=ast.Attribute(value=value, attr="matmul" | "bmm")):
                return value
        return None

    def _written_gelus(self, node: ast.AST) -> Iterator[ast.BinOp]:
        """The largest expressions with tanh and 0.044715, or with erf and 0.5."""
        if isinstance(node, ast.BinOp) and _is_gelu(node):
            yield node
            return
        if isinstance(node, ast.Call) and dotted(node.func) == JOINED:
            return
        for child in ast.iter_child_nodes(node):
            yield from self._written_gelus(child)


def _function(value: object) -> tuple[str, str]:
    """The kind and name of a function of torch; empty for any other value."""
    is_plain = callable(value) and getattr(value, "__hash__", None) is not None
    return FUNCTIONS.get(value, ("", "")) if is_plain else ("", "")


def _is_gelu(node: ast.BinOp) -> bool:
    nodes = list(ast.walk(node))
    functions = [n.func for n in nodes if isinstance(n, ast.Call)]
    called = {f.id for f in functions if isinstance(f, ast.Name)}
    called |= {f.attr for f in functions if isinstance(f, ast.Attribute)}
    numbers = {n.value for n in nodes if isinstance(n, ast.Constant)}
    return ("tanh" in called and 0.044715 in numbers) or ("erf" in called and 0.5 in numbers)


class Reached:
    """Records, while it is entered, which of the calls ran and which modules were called.

    Python's profile function sees them, as in `CallWatch`, inside of which this is entered.
    """

    def __init__(self, calls: Places) -> None:
        self.places = calls
        self.modules: set[nn.Module] = set()
        self.calls: set[tuple[nn.Module, PlainCall]] = set()
        self._by_file: dict[str, list[PlainCall]] = {}
        for call in set(calls.values()):
            self._by_file.setdefault(call.file, []).append(call)

    def __enter__(self) -> "Reached":
        self._before: Any = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def ran(self, model: nn.Module, site: Site) -> bool:
        """Whether a kept site ran. A module that was moved since counts as one that did."""
        try:
            module = model.get_submodule(site.path)
        except AttributeError:
            return True
        call = self.places.get((site.path, site.kind, site.was))
        return module in self.modules if call is None else (module, call) in self.calls

    def missed(self, model: nn.Module, site: Site) -> bool:
        """Whether a fused site that is known by its line did not run."""
        return (site.path, site.kind, site.was) in self.places and not self.ran(model, site)

    def _event(self, frame: FrameType, event: str, function: Any) -> None:
        if self._before is not None:
            self._before(frame, event, function)
        if event == "call":
            if frame.f_code is MODULE_CALL:
                self.modules.add(frame.f_locals["self"])
            self._add(frame.f_code, frame.f_back)
        elif event == "c_call":
            self._add(function, frame)

    def _add(self, called: Any, caller: FrameType | None) -> None:
        """Adds the calls that this one shows to have run, with the module that runs them."""
        if called in RUNS.values():  # perhaps by a module of torch
            while caller is not None and caller.f_code.co_filename not in self._by_file:
                caller = caller.f_back
        if caller is None or caller.f_code.co_filename not in self._by_file:
            return
        calls = [
            call
            for call in self._by_file[caller.f_code.co_filename]
            if caller.f_lineno in call.lines and RUNS.get(call.name, called) is called
        ]
        frame: FrameType | None = caller
        while calls and frame is not None:
            if isinstance(module := frame.f_locals.get("self"), nn.Module):
                self.calls.update((module, call) for call in calls)
                return
            frame = frame.f_back
