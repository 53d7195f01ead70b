"""What the calls in a forward are: a norm of one tensor, a dropout, or neither."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fusedops.patching import flow

__all__ = ["Names", "Reader", "place"]


@dataclass(frozen=True)
class Names:
    """What the dotted names of a forward stand for: two kinds of submodule, and F.dropout."""

    is_norm: Callable[[str], bool]
    is_dropout: Callable[[str], bool]
    is_functional_dropout: Callable[[str], bool]


class Reader:
    """Answers questions about a forward as it was written. A name is dotted, without `self`."""

    def __init__(self, tree: ast.FunctionDef, names: Names) -> None:
        self.names = names
        self.self_name = tree.args.args[0].arg if tree.args.args else ""
        self.tree = copy.deepcopy(tree)
        sums = (n for n in ast.walk(tree) if isinstance(n, ast.BinOp | ast.AugAssign))
        self.text = {place(n): ast.unparse(n) for n in sums}

    def source(self, node: ast.expr | ast.stmt) -> str:
        """The text of a sum, whatever has been replaced in it since."""
        return self.text[place(node)]

    def norm(self, node: ast.AST) -> str:
        """The dotted name of the norm that a call runs on its one argument, else empty."""
        match node:
            case ast.Call(func=func, args=[argument], keywords=[]):
                name = self.submodule(func)
                if name and self.names.is_norm(name) and not isinstance(argument, ast.Starred):
                    return name
        return ""

    def normed_sums(self) -> Iterator[tuple[ast.Call, str, ast.expr | ast.stmt]]:
        """Every call of a norm on what is, or is made of, a sum: (call, norm, the sum)."""
        for call in (n for n in ast.walk(self.tree) if isinstance(n, ast.Call)):
            name = self.submodule(call.func)
            if name and self.names.is_norm(name):
                for value in (*call.args, *(k.value for k in call.keywords)):
                    if made := self._sum_in(value, call.lineno):
                        yield call, name, made

    def _sum_in(self, value: ast.expr, line: int) -> ast.expr | ast.stmt | None:
        if flow.holds_sum(value):
            return value
        name = flow.dotted(value)
        made: Any = flow.given(self.tree, name, line) if name else None
        if isinstance(made, ast.AugAssign):
            return made if isinstance(made.op, ast.Add) else None
        return made.value if made and flow.holds_sum(made.value) else None

    def own_names(self) -> set[str]:
        """The names that only the function itself can give another value."""
        nodes = list(ast.walk(self.tree))
        shared = [n for n in nodes if isinstance(n, ast.Global | ast.Nonlocal)]
        arguments = {n.arg for n in nodes if isinstance(n, ast.arg)}
        return (arguments | flow.stores(self.tree)).difference(*(n.names for n in shared))

    def submodule(self, func: ast.expr) -> str:
        head, _, name = flow.dotted(func).partition(".")
        return name if head == self.self_name else ""

    def is_dropout(self, statement: ast.stmt, name: str = "") -> bool:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                return name in ("", target) and self.dropout(value) is not None
        return False

    def dies(self, name: str, statement: ast.stmt) -> bool:
        """Whether the value of a name is read once in the statement and never after it."""
        once = flow.loads(statement).count(name) == 1
        gone = name in flow.stores(statement) or isinstance(statement, ast.Return)
        return once and (gone or flow.loads(self.tree).count(name) == 1)

    def dropout(self, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        """(x, dropout) of a call: the module, or (p, training) of F.dropout."""
        match node:
            case ast.Call(func=func, args=[x], keywords=[]) if self.names.is_dropout(
                self.submodule(func)
            ):
                return x, copy.deepcopy(func)
            case ast.Call(func=func, args=args, keywords=keywords) if (
                self.names.is_functional_dropout(flow.dotted(func))
            ):
                return _functional_dropout(args, keywords)
        return None

    def norm_after(self, line: int, h: str = "") -> str:
        """The first norm of h (of anything, when not given) after a line of the original."""
        nodes = (n for n in ast.walk(self.tree) if isinstance(n, ast.Call))
        calls = [n for n in nodes if self.norm(n) and n.lineno > line]
        if h:
            calls = [c for c in calls if flow.dotted(c.args[0]) == h]
            calls = [c for c in calls if not self._replaced(h, line, c)]
        return self.norm(min(calls, key=lambda c: c.lineno)) if calls else ""

    def _replaced(self, h: str, line: int, norm: ast.Call) -> bool:
        """Whether h is sure to get another value than `h.method(...)` before the norm."""
        for owner in ast.walk(self.tree):
            if isinstance(owner, ast.If) and norm not in ast.walk(owner):
                continue
            for statement in ast.iter_child_nodes(owner):
                between = line < getattr(statement, "lineno", 0) < norm.lineno
                if between and flow.assigns(statement, h):
                    return True
        return False

    def leaves(self, line: int, h: str) -> bool:
        """Whether h is returned as it is, or put in a tuple."""
        later = [n for n in ast.walk(self.tree) if getattr(n, "lineno", 0) > line]
        if not self.norm_after(0) or h in flow.stores(*later):
            return False
        values = [n.value for n in later if isinstance(n, ast.Return)]
        values += [e for n in later if isinstance(n, ast.Tuple) for e in n.elts]
        return any(flow.dotted(v) == h for v in values if v is not None)


def place(node: ast.expr | ast.stmt) -> tuple:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _functional_dropout(args: list, keywords: list) -> tuple[ast.expr, ast.expr] | None:
    """(x, (p, training)) of the arguments of F.dropout."""
    given = dict(zip(("input", "p", "training"), args, strict=False))
    given.update({k.arg: k.value for k in keywords})
    if len(args) > 3 or not {"input"} <= given.keys() <= {"input", "p", "training"}:
        return None
    p, training = given.get("p", ast.Constant(0.5)), given.get("training", ast.Constant(True))
    return given["input"], ast.Tuple([p, training], ast.Load())
