"""Makes results of rewritten attention contiguous where a model may need that."""

import ast

from fusedops.patching.lines.reader import blocks, is_simple, replaced, stores

__all__ = ["with_rows"]

# Methods and attributes that work in any order in memory
MOVES = {"transpose", "permute", "swapaxes", "contiguous", "reshape", "flatten"}
MOVES |= {"shape", "dtype", "device", "ndim", "size", "dim"}


def with_rows(body: list[ast.stmt], products: list[ast.Call]) -> list[ast.stmt]:
    """The statements with contiguous results of products that other code may view.

    The kernel's results have q's order in memory, [batch, length, heads, width].
    """
    for product in products:
        if not _only_moved(body, product):
            contiguous = ast.Call(ast.Attribute(product, "contiguous", ast.Load()), [], [])
            body = [replaced(statement, product, contiguous) for statement in body]
    return body


def _only_moved(body: list[ast.stmt], product: ast.Call) -> bool:
    """Whether the result is only given to methods that work in any order in memory."""
    for block in [body, *(inner for statement in body for inner in blocks(statement))]:
        for statement in block:
            if is_simple(statement) and product in ast.walk(statement):
                if _is_moved(statement, product):
                    return True
                match statement:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value) if value is product:
                        return _name_is_moved(name, _later(body, statement) or [])
    return False


def _is_moved(statement: ast.AST, value: ast.expr) -> bool:
    attributes = (n for n in ast.walk(statement) if isinstance(n, ast.Attribute))
    return any(n.value is value and n.attr in MOVES for n in attributes)


def _name_is_moved(name: str, statements: list[ast.stmt]) -> bool:
    for statement in statements:
        reads = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
        if not all(_is_moved(statement, n) for n in reads if isinstance(n.ctx, ast.Load)):
            return False
        if isinstance(statement, ast.Assign) and name in stores(*statement.targets):
            return True
    return True


def _later(body: list[ast.stmt], statement: ast.stmt) -> list[ast.stmt] | None:
    """The statements after one that is somewhere in the body."""
    for at, other in enumerate(body):
        if other is statement:
            return body[at + 1 :]
        for inner in blocks(other):
            if (later := _later(inner, statement)) is not None:
                return later + body[at + 1 :]
    return None
