"""Reads a forward's tree: which submodule or torch function each call runs."""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F

from fusedops.patching.lines import syntax
from fusedops.patching.modules.activation import ActivationRef, function_of

__all__ = ["Names", "Reader", "place"]


@dataclass(frozen=True)
class Names:
    """The meaning of a forward's dotted names: submodules by role, and globals."""

    roles: Mapping[str, str]
    meaning: Callable[[str], object]

    def is_a(self, role: str, name: str) -> bool:
        return self.roles.get(name) == role


class Reader:
    """Answers questions about the original forward. Names are dotted, without `self`."""

    def __init__(self, tree: ast.FunctionDef, names: Names) -> None:
        self.names = names
        self.self_name = next((a.arg for a in (*tree.args.posonlyargs, *tree.args.args)), "")
        self.tree = copy.deepcopy(tree)
        self.own = self.own_names()
        sums = (n for n in ast.walk(tree) if isinstance(n, ast.BinOp | ast.AugAssign))
        self.text = {place(n): ast.unparse(n) for n in sums}

    def source(self, node: ast.expr | ast.stmt) -> str:
        """The original text of a sum, even if parts of it were replaced since."""
        return self.text[place(node)]

    def norm(self, node: ast.AST) -> str:
        """The dotted name of the norm that a call applies to its one argument, else empty."""
        return self.called("norm", node)

    def called(self, role: str, node: ast.AST) -> str:
        """The dotted name of the role's submodule that a call applies to its one argument."""
        match node:
            case ast.Call(func=func, args=[argument], keywords=[]):
                name = self.submodule(func)
                if self.names.is_a(role, name) and not isinstance(argument, ast.Starred):
                    return name
        return ""

    def activation(self, node: ast.AST) -> ActivationRef | None:
        """The activation that a call applies to one tensor: a submodule or torch function."""
        if name := self.called("activation", node):
            return ActivationRef(name)
        match node:
            case ast.Call(func=func, args=[argument], keywords=[]):
                function = self.meaning(func)
                plain = not isinstance(argument, ast.Starred) and function_of(function)
                return ActivationRef("", function) if plain else None
        return None

    def normed_sums(self) -> Iterator[tuple[ast.Call, str, ast.expr | ast.stmt]]:
        """Yields each norm call on a sum, or on a value made from one: (call, norm, sum)."""
        for call in (n for n in ast.walk(self.tree) if isinstance(n, ast.Call)):
            name = self.submodule(call.func)
            if name and self.names.is_a("norm", name):
                for value in (*call.args, *(k.value for k in call.keywords)):
                    if made := self._sum_in(value, call.lineno):
                        yield call, name, made

    def _sum_in(self, value: ast.expr, line: int) -> ast.expr | ast.stmt | None:
        if syntax.holds_sum(value):
            return value
        name = syntax.dotted(value)
        made: Any = syntax.last_assignment(self.tree, name, line) if name else None
        if isinstance(made, ast.AugAssign):
            return made if isinstance(made.op, ast.Add) else None
        return made.value if made and syntax.holds_sum(made.value) else None

    def own_names(self) -> set[str]:
        """The names that only the function itself can assign."""
        nodes = list(ast.walk(self.tree))
        shared = [n for n in nodes if isinstance(n, ast.Global | ast.Nonlocal)]
        arguments = {n.arg for n in nodes if isinstance(n, ast.arg)}
        return (arguments | syntax.stores(self.tree)).difference(*(n.names for n in shared))

    def submodule(self, func: ast.expr) -> str:
        head, _, name = syntax.dotted(func).partition(".")
        return name if head == self.self_name else ""

    def helper(self, name: str, operands: list[Any], keywords: Sequence = ()) -> ast.Call:
        """A call to a closure helper, with the layer as the first argument."""
        layer, called = ast.Name(self.self_name, ast.Load()), ast.Name(name, ast.Load())
        return ast.Call(called, [layer, *operands], list(keywords))

    def meaning(self, func: ast.expr) -> object:
        """The value of a name from outside the function."""
        name = syntax.dotted(func)
        return None if name.partition(".")[0] in self.own else self.names.meaning(name)

    def changes_tensors(self, node: ast.AST) -> bool:
        """Whether the node mutates an object or runs a submodule that works in place."""
        inplace = any(self.names.is_a("inplace", self.submodule(c.func)) for c in _calls(node))
        return inplace or syntax.changes_tensors(node)

    def made_by_call(self, node: ast.expr) -> bool:
        """Whether the value is a call's result, or one of several results."""
        if isinstance(node, ast.Call):
            return True
        given = (n for n in ast.walk(self.tree) if isinstance(n, ast.Assign))
        made = [
            n for n in given if isinstance(node, ast.Name) and node.id in syntax.stores(*n.targets)
        ]
        return any(isinstance(n.value, ast.Call) for n in made)

    def is_dropout(self, statement: ast.stmt, name: str = "") -> bool:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                return name in ("", target) and self.dropout(value) is not None
        return False

    def dies(self, name: str, statement: ast.stmt) -> bool:
        """Whether a name's value is read once in the statement and never afterwards."""
        once = syntax.loads(statement).count(name) == 1
        gone = name in syntax.stores(statement) or isinstance(statement, ast.Return)
        return once and (gone or syntax.loads(self.tree).count(name) == 1)

    def dropout(self, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        """(x, dropout) of a dropout call: the module, or (p, training) of F.dropout."""
        match node:
            case ast.Call(func=func, args=[x], keywords=[]) if self.names.is_a(
                "dropout", self.submodule(func)
            ):
                return x, copy.deepcopy(func)
            case ast.Call(func=func, args=args, keywords=keywords) if (
                self.meaning(func) is F.dropout
            ):
                return _functional_dropout(args, keywords)
        return None

    def norm_after(self, line: int, h: str = "") -> str:
        """The first norm of h (of anything, if h is empty) after a source line."""
        nodes = (n for n in ast.walk(self.tree) if isinstance(n, ast.Call))
        calls = [n for n in nodes if self.norm(n) and n.lineno > line]
        if h:
            calls = [c for c in calls if syntax.dotted(c.args[0]) == h]
            calls = [c for c in calls if not self._replaced(h, line, c)]
        return self.norm(min(calls, key=lambda c: c.lineno)) if calls else ""

    def _replaced(self, h: str, line: int, norm: ast.Call) -> bool:
        """Whether h certainly gets another value, not `h.method(...)`, before the norm."""
        for owner in ast.walk(self.tree):
            if isinstance(owner, ast.If) and norm not in ast.walk(owner):
                continue
            for statement in ast.iter_child_nodes(owner):
                between = line < getattr(statement, "lineno", 0) < norm.lineno
                if between and syntax.assigns(statement, h):
                    return True
        return False


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def place(node: ast.expr | ast.stmt) -> tuple:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _functional_dropout(args: list, keywords: list) -> tuple[ast.expr, ast.expr] | None:
    """(x, (p, training)) from F.dropout's arguments."""
    given = dict(zip(("input", "p", "training"), args, strict=False))
    given.update({k.arg: k.value for k in keywords})
    if len(args) > 3 or not {"input"} <= given.keys() <= {"input", "p", "training"}:
        return None
    p, training = given.get("p", ast.Constant(0.5)), given.get("training", ast.Constant(True))
    return given["input"], ast.Tuple([p, training], ast.Load())
