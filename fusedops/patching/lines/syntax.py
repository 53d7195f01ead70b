"""Syntax queries: what statements call, read and store, and whether they can be moved."""

import ast
from collections.abc import Callable, Iterator
from typing import Any

__all__ = [
    "blocks",
    "calls",
    "changes_tensors",
    "copied_name",
    "dotted",
    "expressions",
    "first_call",
    "holds_sum",
    "is_idle",
    "is_simple",
    "is_sum",
    "last_assignment",
    "loads",
    "mentions",
    "movable",
    "replaced",
    "stores",
    "sum_of",
]

SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
CONDITIONAL = (ast.BoolOp, ast.IfExp, ast.Lambda, *COMPREHENSIONS)
SHAPE_ONLY = {"shape", "dtype", "device", "ndim"}
NO_TENSOR = ast.Constant, ast.Tuple, ast.List, ast.JoinedStr
PURE = {"hasattr", "isinstance", "len", "type"}
SEES_VALUES = ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp
SEES_ATTRIBUTES = *SEES_VALUES, ast.Attribute, ast.Call
RUNS = ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, *CONDITIONAL
GRAMMAR = ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop
INERT = ast.expr, ast.keyword, ast.operator, ast.Pass, *GRAMMAR, *SIMPLE


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text, empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def sum_of(statement: ast.stmt) -> tuple[str, Any] | None:
    """("h", a + b) for `h = a + b` and for `h: Tensor = a + b`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=h)], value=add) if is_sum(add):
            return h, add
        case ast.AnnAssign(target=ast.Name(id=h), value=ast.BinOp() as add) if is_sum(add):
            return h, add
    return None


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
    found: list[Any] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) if name in map(dotted, targets):
                found.append(node)
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target) if (
                dotted(target) == name
            ):
                found.append(node)
    return max((n for n in found if n.lineno < line), key=lambda n: n.lineno, default=None)


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


def is_idle(statement: ast.stmt) -> bool:
    """Whether the statement changes only names: `a = b`, `pass`, or a check that raises."""
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.Name() | ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.Subscript(value=size, slice=at)):
            return dotted(size).endswith(".shape") and not any(calls(at)) and not loads(at)
        case ast.If(test=test, body=[ast.Raise()], orelse=[]):
            nodes = [n for n in ast.walk(test) if not isinstance(n, GRAMMAR)]
            pure = all(dotted(n.func) in PURE for n in nodes if isinstance(n, ast.Call))
            return pure and all(isinstance(n, SEES_ATTRIBUTES) for n in nodes)
    return False


def copied_name(statement: ast.stmt) -> tuple[str, str] | None:
    """("a", "b") for `a = b`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=to)], value=ast.Name(id=name)):
            return to, name
    return None


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether a name's value is used for more than its shape, dtype or device."""
    match node:
        case ast.Attribute(value=ast.Name(), attr=attr) if attr in SHAPE_ONLY:
            return False
        case ast.Name(id=name, ctx=ast.Load()) | ast.AugAssign(target=ast.Name(id=name)):
            if name in names:
                return True
    return any(mentions(child, names) for child in ast.iter_child_nodes(node))


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


def stores(*nodes: ast.AST) -> set[str]:
    names = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if not isinstance(n.ctx, ast.Load)}


def movable(
    test: ast.expr, before: list[ast.stmt], own: set[str], harmless: Callable[[ast.Call], bool]
) -> bool:
    """Whether an `if` test gives the same result before these statements as after them.

    A call among them may change any object that it reaches. The test may then read no attribute, no
    container and only names in `own`, the function's own names. Of a name that the statements use,
    it may test only the identity. harmless: says which calls change nothing.
    """
    if set(loads(test)) & stores(*before):
        return False
    nodes = [n for n in ast.walk(test) if not isinstance(n, GRAMMAR)]
    if not any(_changes_objects(n, harmless) for s in before for n in ast.walk(s)):
        called = [n.func for n in nodes if isinstance(n, ast.Call)]
        pure = all(dotted(f) in PURE for f in called)
        return pure and all(isinstance(n, SEES_ATTRIBUTES) for n in nodes)
    contains = any(isinstance(n, ast.In | ast.NotIn) for n in ast.walk(test))
    used = {name for statement in before for name in loads(statement)}
    plain = all(isinstance(n, SEES_VALUES) for n in nodes)
    local = own.issuperset(loads(test))
    return plain and local and not contains and not _names_by_value(test) & used


def _changes_objects(node: ast.AST, harmless: Callable[[ast.Call], bool]) -> bool:
    match node:
        case ast.Call():
            return not harmless(node)
        case ast.Attribute(ctx=ctx) | ast.Subscript(ctx=ctx):
            return not isinstance(ctx, ast.Load)
        case ast.AugAssign() | ast.Await() | ast.Yield() | ast.YieldFrom():
            return True
    return not isinstance(node, INERT)


def _names_by_value(test: ast.AST) -> set[str]:
    """The names whose value the test uses, not those in `a is None`."""
    match test:
        case ast.Compare(ops=ops) if all(isinstance(op, ast.Is | ast.IsNot) for op in ops):
            return set()
        case ast.Name(id=name):
            return {name}
    return set().union(*(_names_by_value(child) for child in ast.iter_child_nodes(test)))
