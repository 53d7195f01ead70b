"""Reads a forward's syntax tree: its statements, and what each call runs."""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F

from fusedops.patching.modules.activation import (
    Activation,
    ActivationRef,
    function_of,
    learn_expression,
    learn_function,
)

__all__ = [
    "CONDITIONAL",
    "PARTIAL",
    "SIMPLE",
    "Names",
    "Reader",
    "blocks",
    "calls",
    "changes_tensors",
    "dotted",
    "expressions",
    "first_call",
    "is_simple",
    "is_sum",
    "loads",
    "mentions",
    "place",
    "replaced",
    "stores",
]

PARTIAL = "_fusedops_partial"  # functools.partial, in a rewritten forward
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
CONDITIONAL = (ast.BoolOp, ast.IfExp, ast.Lambda, *COMPREHENSIONS)
SHAPE_ONLY = {"shape", "dtype", "device", "ndim"}
NO_TENSOR = ast.Constant, ast.Tuple, ast.List, ast.JoinedStr
POINTWISE = {"erf", "exp", "pow", "sigmoid", "square", "tanh"}  # methods of an activation's code
RUNS = ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, *CONDITIONAL


@dataclass(frozen=True)
class Names:
    """The meaning of a function's dotted names: submodules by role, and globals. file: its file."""

    roles: Mapping[str, str]
    meaning: Callable[[str], object]
    file: str = ""

    def is_a(self, role: str, name: str) -> bool:
        return self.roles.get(name) == role


class Reader:
    """Answers questions about the original forward. Names are dotted, without `self`."""

    def __init__(self, tree: ast.FunctionDef, names: Names) -> None:
        self.names = names
        self.self_name = next((a.arg for a in (*tree.args.posonlyargs, *tree.args.args)), "")
        self.tree = copy.deepcopy(tree)
        self.local_names = self.own_names()
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
            case ast.Call(func=func, args=[argument], keywords=keywords):
                function = self.meaning(func)
                learn_function(function)
                options = tuple((str(k.arg), self._option(k.value)) for k in keywords)
                activation = function_of(function) or (keywords and function is F.gelu)
                plain = activation and not isinstance(argument, ast.Starred)
                given = all(name == "approximate" and option for name, option in options)
                return ActivationRef("", function, options) if plain and given else None
        return None

    def written_activation(
        self, statement: ast.stmt, name: str
    ) -> tuple[ast.expr, Activation, dict[str, float]] | None:
        """The expression in a statement that is an activation of a name, and reads it last.

        It is evaluated before anything else in the statement that may have an effect. Also returns
        the global numbers that it reads.
        """
        ran = next((n for n in _in_order(statement) if isinstance(n, RUNS)), None)
        for node in expressions(statement):
            if not isinstance(node, ast.BinOp) or all(part is not ran for part in ast.walk(node)):
                continue
            reads, whole = (loads(part).count(name) for part in (node, statement))
            last = name in stores(statement) or isinstance(statement, ast.Return)
            if reads < 2 or reads != whole or not (last or loads(self.tree).count(name) == reads):
                return None
            values = self._values_in(node, name)
            if values is None:
                continue
            if activation := learn_expression(ast.unparse(node), name, values):
                numbers = {n: v for n, v in values.items() if isinstance(v, int | float)}
                return node, activation, numbers
        return None

    def _values_in(self, node: ast.expr, name: str) -> dict[str, object] | None:
        """The values of the names in an expression of pointwise functions; None for another."""
        for part in ast.walk(node):
            match part:
                case ast.Call(func=ast.Attribute(value=value, attr=attr)) if not dotted(value):
                    if attr not in POINTWISE:
                        return None
                case ast.Call(func=func):
                    head, _, rest = dotted(func).partition(".")
                    if not (rest in POINTWISE if head == name else self.meaning(func)):
                        return None
                case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
                    return None
        names = {*loads(node)} - {name}
        values = {n: self.meaning(ast.Name(n, ast.Load())) for n in names}
        return None if None in values.values() else values

    def _option(self, value: ast.expr) -> str:
        """A string literal in quotes, or the dotted name of an attribute; empty for others."""
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return repr(value.value)
        return self.submodule(value)

    def function(self, activation: Any) -> ast.expr:
        """What an activation's call calls, with its keywords."""
        called = copy.deepcopy(activation.func)
        if not activation.keywords:
            return called
        options = copy.deepcopy(activation.keywords)
        return ast.Call(ast.Name(PARTIAL, ast.Load()), [called], options)

    def normed_sums(self) -> Iterator[tuple[ast.Call, str, ast.expr | ast.stmt]]:
        """Yields each norm call on a sum, or on a value made from one: (call, norm, sum)."""
        for call in (n for n in ast.walk(self.tree) if isinstance(n, ast.Call)):
            name = self.submodule(call.func)
            if name and self.names.is_a("norm", name):
                for value in (*call.args, *(k.value for k in call.keywords)):
                    if sum_node := self._sum_in(value, call.lineno):
                        yield call, name, sum_node

    def _sum_in(self, value: ast.expr, line: int) -> ast.expr | ast.stmt | None:
        if holds_sum(value):
            return value
        name = dotted(value)
        assignment: Any = last_assignment(self.tree, name, line) if name else None
        if isinstance(assignment, ast.AugAssign):
            return assignment if isinstance(assignment.op, ast.Add) else None
        return assignment.value if assignment and holds_sum(assignment.value) else None

    def own_names(self) -> set[str]:
        """The names that only the function itself can assign."""
        nodes = list(ast.walk(self.tree))
        shared = [n for n in nodes if isinstance(n, ast.Global | ast.Nonlocal)]
        arguments = {n.arg for n in nodes if isinstance(n, ast.arg)}
        return (arguments | stores(self.tree)).difference(*(n.names for n in shared))

    def submodule(self, func: ast.expr) -> str:
        head, _, name = dotted(func).partition(".")
        return name if head == self.self_name else ""

    def helper(self, name: str, operands: list[Any], keywords: Sequence = ()) -> ast.Call:
        """A call to a closure helper, with the layer as the first argument."""
        layer, called = ast.Name(self.self_name, ast.Load()), ast.Name(name, ast.Load())
        return ast.Call(called, [layer, *operands], list(keywords))

    def meaning(self, func: ast.expr) -> object:
        """The value of a name from outside the function."""
        name = dotted(func)
        return None if name.partition(".")[0] in self.local_names else self.names.meaning(name)

    def changes_tensors(self, node: ast.AST) -> bool:
        """Whether the node mutates an object or runs a submodule that works in place."""
        inplace = any(self.names.is_a("inplace", self.submodule(c.func)) for c in _all_calls(node))
        return inplace or changes_tensors(node)

    def made_by_call(self, node: ast.expr) -> bool:
        """Whether the value is a call's result, or one of several results."""
        if isinstance(node, ast.Call):
            return True
        assignments = (n for n in ast.walk(self.tree) if isinstance(n, ast.Assign))
        definitions = [
            n for n in assignments if isinstance(node, ast.Name) and node.id in stores(*n.targets)
        ]
        return any(isinstance(n.value, ast.Call) for n in definitions)

    def is_dropout(self, statement: ast.stmt, name: str = "") -> bool:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                return name in ("", target) and self.dropout(value) is not None
        return False

    def dies(self, name: str, statement: ast.stmt) -> bool:
        """Whether a name's value is read once in the statement and never afterwards."""
        once = loads(statement).count(name) == 1
        gone = name in stores(statement) or isinstance(statement, ast.Return)
        return once and (gone or loads(self.tree).count(name) == 1)

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
        norms = [n for n in nodes if self.norm(n) and n.lineno > line]
        if h:
            norms = [n for n in norms if dotted(n.args[0]) == h]
            norms = [n for n in norms if not self._replaced(h, line, n)]
        return self.norm(min(norms, key=lambda n: n.lineno)) if norms else ""

    def _replaced(self, h: str, line: int, norm: ast.Call) -> bool:
        """Whether h certainly gets another value, not `h.method(...)`, before the norm."""
        for owner in ast.walk(self.tree):
            if isinstance(owner, ast.If) and norm not in ast.walk(owner):
                continue
            for statement in ast.iter_child_nodes(owner):
                between = line < getattr(statement, "lineno", 0) < norm.lineno
                if between and assigns(statement, h):
                    return True
        return False


def _all_calls(node: ast.AST) -> Iterator[ast.Call]:
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


# Statements and expressions


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text, empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def is_sum(node: ast.expr) -> bool:
    """Whether the node may be a sum of two tensors."""
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return not any(isinstance(side, NO_TENSOR) for side in (left, right))
    return False


def holds_sum(node: ast.AST | None) -> bool:
    """Whether a value is a sum of two tensors, or made from one by casts and other operations."""
    match node:
        case ast.BinOp() if is_sum(node):
            return True
        case ast.BinOp(left, _, right):
            return holds_sum(left) or holds_sum(right)
        case ast.IfExp(_, body, orelse):
            return holds_sum(body) or holds_sum(orelse)
        case ast.Call(func=ast.Attribute(value=value, attr=attr)):
            return attr in ("add", "add_") or holds_sum(value)
        case ast.NamedExpr(value=value) | ast.Subscript(value=value) | ast.Attribute(value=value):
            return holds_sum(value)
    return False


def last_assignment(tree: ast.AST, name: str, line: int) -> ast.stmt | None:
    """The last statement before a line that assigns a dotted name."""
    assignments: list[Any] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) if name in map(dotted, targets):
                assignments.append(node)
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target) if (
                dotted(target) == name
            ):
                assignments.append(node)
    return max((n for n in assignments if n.lineno < line), key=lambda n: n.lineno, default=None)


def is_simple(statement: ast.stmt) -> bool:
    return isinstance(statement, SIMPLE)


def changes_tensors(node: ast.AST) -> bool:
    """Whether the node mutates an object: `x += y`, `x[0] = y`, `x.add_(y)`, `inplace=`."""
    match node:
        case ast.AugAssign():
            return True
        case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
            return True
        case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_"):
            return True
        case ast.keyword(arg="inplace" | "out"):
            return True
    return any(changes_tensors(child) for child in ast.iter_child_nodes(node))


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yields every block of statements in a tree.

    Skips blocks of inner functions and of a `try`, whose handlers may see a half-done statement.
    """
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
            for statement in block:
                if not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Try):
                    yield from blocks(statement)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes, without inner scopes, where names mean other things."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.Lambda, *COMPREHENSIONS)):
            yield from expressions(child)


def replaced(tree: Any, old: ast.AST, new: ast.expr) -> Any:
    """The tree with `new` in place of `old`."""

    class Replace(ast.NodeTransformer):
        def visit(self, node):
            return ast.copy_location(new, node) if node is old else super().generic_visit(node)

    return Replace().visit(tree)


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls that certainly happen when a statement runs."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, CONDITIONAL):
            if isinstance(child, ast.Call):
                yield child
            yield from calls(child)


def first_call(statement: ast.stmt) -> ast.Call | None:
    """The call that certainly happens, if only sums run before it."""
    ran = next((n for n in _in_order(statement) if isinstance(n, RUNS)), None)
    return ran if isinstance(ran, ast.Call) and ran in calls(statement) else None


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in evaluation order; for an assignment, its value first."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign):
        children = [node.value, *node.targets]
    for child in children:
        yield from _in_order(child)
    yield node


def assigns(statement: ast.AST, name: str) -> bool:
    """Whether the name gets a value other than its own view or cast, `name.method(...)`."""
    if not isinstance(statement, ast.Assign) or name not in stores(*statement.targets):
        return False
    method = statement.value.func if isinstance(statement.value, ast.Call) else statement.value
    return dotted(method).partition(".")[0] != name


def loads(node: ast.AST) -> list[str]:
    """The names that are read, including those of `x += y`."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    read = [n.id for n in names if isinstance(n.ctx, ast.Load)]
    changed = (n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign))
    return read + [n.id for n in changed if isinstance(n, ast.Name)]


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether a name's value is used for more than its shape, dtype or device."""
    match node:
        case ast.Attribute(value=ast.Name(), attr=attr) if attr in SHAPE_ONLY:
            return False
        case ast.Name(id=name, ctx=ast.Load()) | ast.AugAssign(target=ast.Name(id=name)):
            if name in names:
                return True
    return any(mentions(child, names) for child in ast.iter_child_nodes(node))


def stores(*nodes: ast.AST) -> set[str]:
    names = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if not isinstance(n.ctx, ast.Load)}
