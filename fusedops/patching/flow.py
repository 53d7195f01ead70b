"""Questions about statements: what they call, read, store, and whether they can be moved."""

import ast
from collections.abc import Iterator
from typing import Any

__all__ = [
    "calls",
    "copied_name",
    "dotted",
    "is_simple",
    "is_sum",
    "loads",
    "mentions",
    "movable",
    "stores",
    "sum_of",
]

SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
CONDITIONAL = (ast.BoolOp, ast.IfExp, ast.Lambda, *COMPREHENSIONS)
SHAPE_ONLY = {"shape", "dtype", "device", "ndim"}
NO_TENSOR = ast.Constant, ast.Tuple, ast.List, ast.JoinedStr
PURE = {"hasattr", "isinstance", "len", "type"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text, empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def sum_of(statement: ast.stmt) -> tuple[str, Any] | None:
    """("h", a + b) of `h = a + b`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=h)], value=add) if is_sum(add):
            return h, add
    return None


def is_sum(node: ast.expr) -> bool:
    """Whether it may be a sum of two tensors."""
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return not any(isinstance(side, NO_TENSOR) for side in (left, right))
    return False


def is_simple(statement: ast.stmt) -> bool:
    return isinstance(statement, SIMPLE)


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls of a statement that are sure to be made when it runs."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, CONDITIONAL):
            if isinstance(child, ast.Call):
                yield child
            yield from calls(child)


def copied_name(statement: ast.stmt) -> tuple[str, str] | None:
    """("a", "b") for `a = b`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=to)], value=ast.Name(id=name)):
            return to, name
    return None


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether the value of a name is used, for more than its shape, dtype or device."""
    match node:
        case ast.Attribute(value=ast.Name(), attr=attr) if attr in SHAPE_ONLY:
            return False
        case ast.Name(id=name, ctx=ast.Load()) | ast.AugAssign(target=ast.Name(id=name)):
            if name in names:
                return True
    return any(mentions(child, names) for child in ast.iter_child_nodes(node))


def assigns(statement: ast.AST, name: str) -> bool:
    """Whether it gives the name another value than a view or a cast of it, `name.method(...)`."""
    if not isinstance(statement, ast.Assign) or name not in stores(*statement.targets):
        return False
    method = statement.value.func if isinstance(statement.value, ast.Call) else statement.value
    return dotted(method).partition(".")[0] != name


def loads(node: ast.AST) -> list[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return [n.id for n in names if isinstance(n.ctx, ast.Load)]


def stores(*nodes: ast.AST) -> set[str]:
    names = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if not isinstance(n.ctx, ast.Load)}


def movable(test: ast.expr, before: list[ast.stmt]) -> bool:
    """Whether the test of an `if` gives the same before these statements as after them."""
    called = [n.func for n in ast.walk(test) if isinstance(n, ast.Call)]
    pure = all(dotted(f) in PURE for f in called)
    walrus = any(isinstance(n, ast.NamedExpr) for n in ast.walk(test))
    return pure and not walrus and not set(loads(test)) & stores(*before)
