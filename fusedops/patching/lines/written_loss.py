"""Finds forwards that compute the cross entropy of a head's output, and fuses those calls.

    logits = self.lm_head(x)
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

The call may be an nn.CrossEntropyLoss's, or stand in a function that gets logits and labels.
Reading the forward finds the head and the arguments that hold the labels: where they are given, the
head returns lazy logits. torch then hands its call of `F.cross_entropy` to the lazy logits, with
all arguments. So a wrong reading costs time, but changes no result.
"""

import ast
import inspect
import os
from collections.abc import Hashable, Iterator
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from fusedops.patching.core.probing import WrittenLoss, names_of
from fusedops.patching.core.probing import names_in as all_names_in
from fusedops.patching.core.source import Unreadable, innermost, parse
from fusedops.patching.core.swap import Unswappable, original_class, version
from fusedops.patching.lines.code import names_in
from fusedops.patching.lines.layer import roles_of
from fusedops.patching.lines.reader import Reader, stores

__all__ = ["written_loss"]

# Methods and attributes of logits that need no values, or that lazy logits record.
WAITS = {
    *("contiguous", "dim", "flatten", "float", "reshape", "size", "to", "type_as", "view"),
    *("device", "dtype", "ndim", "requires_grad", "shape"),
}
CALLED = "cross_entropy", "CrossEntropyLoss"
NOT_A_HEAD = "its logits are not the output of a linear that its forward calls"
NO_LABELS = "its forward computes the labels itself"
SMALL = "its logits are smaller than the head's input"

# class -> its version -> the names in its forward's code
_names: "WeakKeyDictionary[type, dict[Hashable, set[str]]]" = WeakKeyDictionary()


def written_loss(module: nn.Module, head: nn.Module | None = None) -> WrittenLoss | str:
    """The cross entropy in a module's forward, or why none is fused; empty without one.

    head: the model's, if it has a method for it; else a linear that the forward calls.
    """
    original = original_class(module)
    if not _may_call(module, original):
        return ""
    try:
        forward = innermost(original)
        tree = parse(forward)
    except (Unreadable, Unswappable):
        return ""
    code = _Forward(module, head, Reader(tree, names_in(forward, roles_of(module))))
    reasons = []
    for call, name, node in code.losses():
        line = f"{name}, {os.path.basename(forward.__code__.co_filename)}:{node.lineno}"
        loss = code.loss(call, line)
        if isinstance(loss, WrittenLoss):
            return loss
        reasons.append(loss)
    return next(iter(reasons), "")


def _may_call(module: nn.Module, original: type[nn.Module]) -> bool:
    """Whether the class is somebody's own, and names a cross entropy but no loss function."""
    home = str(original.__module__).partition(".")[0]
    if isinstance(module, torch.jit.ScriptModule) or home in ("torch", "fusedops"):
        return False
    cached, key = _names.setdefault(original, {}), version(original)
    if key not in cached:
        cached[key] = all_names_in(original)
    has_child = any(isinstance(child, nn.CrossEntropyLoss) for child in module.children())
    return "loss_function" not in cached[key] and (has_child or not cached[key].isdisjoint(CALLED))


class _Forward:
    """A forward's tree: its losses, and where their logits and labels come from."""

    def __init__(self, module: nn.Module, head: nn.Module | None, reader: Reader) -> None:
        self.module, self.head, self.read = module, head, reader
        self.nodes = list(ast.walk(reader.tree))
        given = reader.tree.args
        arguments = *given.posonlyargs, *given.args, *given.kwonlyargs
        self.parameters = {a.arg for a in arguments} - {reader.self_name}
        self.values: dict[str, list[ast.expr]] = {}  # a name's, in all assignments
        for node in self.nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    names = stores(*targets)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    names = stores(target)
                case ast.AugAssign(target=target, value=value):
                    names = stores(target)
                case _:
                    continue
            for name in names:
                self.values.setdefault(name, []).append(value)

    def losses(self) -> Iterator[tuple[ast.Call, str, ast.expr]]:
        """Yields (call, function, where it is named) of each cross entropy, or call of one."""
        for node in self.nodes:
            if not isinstance(node, ast.Call):
                continue
            if self.read.meaning(node.func) is F.cross_entropy:
                yield node, "F.cross_entropy", node
            elif makes := self._maker(node.func):
                yield node, "nn.CrossEntropyLoss", makes
            elif helper := self._helper(node.func):
                yield node, helper, node

    def _maker(self, func: ast.expr) -> ast.expr | None:
        """What makes the nn.CrossEntropyLoss that is called; func if it is a child."""
        child = self.read.submodule(func)
        if child and isinstance(_child(self.module, child), nn.CrossEntropyLoss):
            return func
        values = self.values.get(func.id, []) if isinstance(func, ast.Name) else [func]
        calls = (v for v in values if isinstance(v, ast.Call))
        return next((c for c in calls if self.read.meaning(c.func) is nn.CrossEntropyLoss), None)

    def _helper(self, func: ast.expr) -> str:
        """The name of a function or method that names a cross entropy, if it is one."""
        name = self.read.submodule(func)
        function: Any = inspect.getattr_static(original_class(self.module), name, None)
        function = self.read.meaning(func) if function is None else function
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
            return ""
        return "" if names_of(function).isdisjoint(CALLED) else function.__name__

    def loss(self, call: ast.Call, was: str) -> WrittenLoss | str:
        """The loss of a call with logits and labels, which are two of its arguments."""
        given = [*call.args, *(k.value for k in call.keywords)]
        names: set[str] = set()
        head, line, logits = "", 0, None
        for logits in given:
            names.clear()
            heads = ((self._head_of_call(r), r.lineno) for r in self._roots(logits, names))
            head, line = next((pair for pair in list(heads) if pair[0]), ("", 0))
            if head:
                break
        if not head:
            return NOT_A_HEAD
        weight = None if self.head is not None else _child(self.module, head).weight
        if weight is not None and weight.shape[0] < weight.shape[-1]:
            return SMALL
        if line := self._reads(names, line):
            return f"its forward also computes with the logits, in line {line}"
        others = (self._roots(value) for value in given if value is not logits)
        arguments = ({r.id for r in roots if isinstance(r, ast.Name)} for roots in others)
        labels = next(filter(None, arguments), set())
        if not labels:
            return NO_LABELS
        child = self.read.submodule(call.func)
        return WrittenLoss(was, "" if self.head is not None else head, tuple(sorted(labels)), child)

    def _roots(self, node: ast.expr, names: set[str] | None = None) -> Iterator[ast.expr]:
        """The arguments and calls that a value is made from, and the names on the way."""
        names = set() if names is None else names
        match node:
            case ast.Name(id=name) if name in self.values and name not in names:
                names.add(name)
                for value in self.values[name]:
                    yield from self._roots(value, names)
                if name in self.parameters:
                    yield node
            case ast.Name(id=name) if name in self.parameters and name not in self.values:
                yield node
            case ast.Call() if self.read.submodule(node.func):
                yield node
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in WAITS:
                yield from self._roots(value, names)
            case ast.Call(func=func, args=[first, *_]) if self._keeps(func):
                yield from self._roots(first, names)
            case ast.BinOp(left=left, right=right):
                yield from self._roots(left, names)
                yield from self._roots(right, names)
            case ast.IfExp(body=body, orelse=orelse):
                yield from self._roots(body, names)
                yield from self._roots(orelse, names)
            case ast.Subscript(value=value) | ast.Attribute(value=value):
                yield from self._roots(value, names)

    def _head_of_call(self, root: ast.expr) -> str:
        """The name of the child that is the head, or holds it, if it is called."""
        name = self.read.submodule(root.func) if isinstance(root, ast.Call) else ""
        if not name:
            return ""
        if self.head is None:
            return name if self.read.names.is_a("linear", name) else ""
        child = _child(self.module, name)
        return name if child is not None and self.head in child.modules() else ""

    def _reads(self, names: set[str], head: int) -> int:
        """The line after the head's where one of these names is used for another purpose."""
        losses = {id(call) for call, _, _ in self.losses()}
        returned = {id(n) for r in self.nodes if isinstance(r, ast.Return) for n in ast.walk(r)}
        for node in self.nodes:
            if not isinstance(node, ast.Call) or id(node) in losses or id(node) in returned:
                continue
            if isinstance(self.read.meaning(node.func), type):  # collects the outputs
                continue
            given = [*node.args, *(k.value for k in node.keywords)]
            match node.func:
                case ast.Attribute(value=ast.Name(), attr=attr) if attr not in WAITS:
                    given.append(node.func.value)
            read = any(isinstance(g, ast.Name) and g.id in names for g in given)
            if read and node.lineno > head and not self._keeps(node.func):
                return node.lineno
        return 0

    def _keeps(self, func: ast.expr) -> bool:
        """Whether it is a function of torch whose first argument's values may wait."""
        meaning = self.read.meaning(func)
        return meaning is torch.tanh or meaning is F.pad


def _child(module: nn.Module, name: str) -> Any:
    """The child of that dotted name; None without one."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
