"""Rewrites a forward's syntax tree so that a sum and its norm become one call.

    hidden = residual + hidden              y, hidden = _fusedops_add_norm(
    residual = hidden                           self, residual, hidden, norm=self.norm)
    hidden = self.norm(hidden)              residual = hidden
                                            hidden = y
                                            del y

    self.norm(a + b)                        _fusedops_add_norm(self, self.norm, a, b)[0]

The rewritten lines run everything in the original order: the norm moves past nothing that could
change it. With `norm=`, the norm is looked up after the terms are computed.

A dropout right before the sum becomes part of the call. The helper functions are in the closure, so
that a forward that someone kept still runs after unpatch. Each call decides whether to run the
fused function or the original lines, so a rewritten forward computes what the original does,
whatever the modules are.
"""

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusedops.patching.lines.reader import (
    SIMPLE,
    Names,
    Reader,
    calls,
    dotted,
    first_call,
    is_simple,
    is_sum,
    loads,
    mentions,
    place,
    replaced,
    stores,
)

__all__ = ["HELPER", "ResidualSum", "rewrite"]

HELPER = "_fusedops_add_norm"
UNREAD = "the sum or its norm call is written in an unsupported form"
IN_PLACE = "the sum is computed in place"
JUMPS = ast.Return, ast.Raise, ast.Continue, ast.Break

# What an `if` test may contain, and what changes no object
PURE = {"hasattr", "isinstance", "len", "type"}
SEES_VALUES = ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp
SEES_ATTRIBUTES = *SEES_VALUES, ast.Attribute, ast.Call
GRAMMAR = ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop
INERT = ast.expr, ast.keyword, ast.operator, ast.Pass, *GRAMMAR, *SIMPLE


@dataclass(frozen=True)
class ResidualSum:
    """A sum: its source, the norm that follows, and why it is not fused (if it is not)."""

    line: int
    sum: str
    norm: str
    dropout: bool = False
    reason: str = ""


def rewrite(tree: ast.FunctionDef, names: Names) -> list[ResidualSum]:
    """Changes `tree` in place. Returns every sum that is normed."""
    rewriter = _ResidualRewriter(tree, names)
    tree.body = rewriter.block(tree.body)
    ast.fix_missing_locations(tree)
    return rewriter.outcome()


class _ResidualRewriter:
    def __init__(self, tree: ast.FunctionDef, names: Names) -> None:
        self.read = Reader(tree, names)
        self.found: list[ResidualSum] = []
        self.done: set[tuple] = set()  # positions of fused norm calls
        self.stuck: set[int] = set()  # lines of sums that cannot move past an `if`

    def outcome(self) -> list[ResidualSum]:
        """The finds in source order. A sum in both branches of an `if` may be fused in one."""
        self.found += self._unread()
        sums = sorted(dict.fromkeys(self.found), key=lambda f: f.line)
        fused = {(f.line, f.norm) for f in sums if not f.reason}
        return [f for f in sums if not f.reason or (f.line, f.norm) not in fused]

    def _unread(self) -> list[ResidualSum]:
        """The normed sums that no other method has handled."""
        handled = {(f.line, f.norm) for f in self.found}
        return [
            ResidualSum(sum_node.lineno, ast.unparse(sum_node), norm, reason=UNREAD)
            for call, norm, sum_node in self.read.normed_sums()
            if place(call) not in self.done and (sum_node.lineno, norm) not in handled
        ]

    def block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrites one block's statements and the blocks inside them."""
        at = 0
        while at < len(block):
            if named := sum_of(block[at]):
                block = self._spread(block, at, *named) or self._fuse_named(block, at, *named)
            block[at] = self._fuse_inline(block, at)
            self._note_in_place(block[at])
            at += 1
        for statement in block:
            self._inner_blocks(statement)
        return block

    def _inner_blocks(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return
        for name in ("body", "orelse", "finalbody"):
            if inner := getattr(statement, name, None):
                setattr(statement, name, self.block(inner))
        for handler in getattr(statement, "handlers", []):
            handler.body = self.block(handler.body)

    # h = a + b, and a norm of h in a later statement

    def _fuse_named(self, block: list, at: int, h: str, add: ast.BinOp) -> list[ast.stmt]:
        end, call = self._follow(block, at, h)
        if call is None:
            self._miss(block[at], h, add, block[end] if end else None)
            return block
        y = f"_fusedops_y{len(self.found)}"
        fused = self._call(call, add, block, at)
        fused.keywords.append(ast.keyword("norm", fused.args.pop(1)))
        targets = ast.Tuple([ast.Name(y, ast.Store()), ast.Name(h, ast.Store())], ast.Store())
        block[at] = ast.copy_location(ast.Assign([targets], fused), block[at])
        block[end] = replaced(block[end], call, ast.Name(y, ast.Load()))
        if not isinstance(block[end], ast.Return):  # else y would keep its memory until the end
            delete = ast.Delete([ast.Name(y, ast.Del())])
            block.insert(end + 1, ast.copy_location(delete, block[end]))
        return block

    def _follow(self, block: list, at: int, h: str) -> tuple[int, ast.Call | None]:
        """The first statement after `at` that uses h or a copy of it, and its norm call."""
        same = {h}
        for i in range(at + 1, len(block)):
            copied = copied_name(block[i])
            if copied and copied[1] in same:
                same.add(copied[0])
            elif mentions(block[i], same):
                return i, self._norm_call(block[i], same)
            elif is_idle(block[i]):
                same -= stores(block[i])
            else:
                return i, None
        return 0, None

    def _norm_call(self, statement: ast.stmt, same: set[str]) -> ast.Call | None:
        if not is_simple(statement):
            return None
        call = first_call(statement)
        if call is None or not self.read.norm(call) or dotted(call.args[0]) not in same:
            return None
        return call

    # self.norm(a + b)

    def _fuse_inline(self, block: list, at: int) -> ast.stmt:
        statement = block[at]
        if not is_simple(statement):
            return statement
        for call in list(calls(statement)):
            if self.read.norm(call) and is_sum(call.args[0]):
                fused = self._call(call, call.args[0], block, at)
                first = ast.Subscript(fused, ast.Constant(0), ast.Load())
                statement = block[at] = replaced(statement, call, first)
        return statement

    # An `if` between the sum and its norm

    def _spread(self, block: list, at: int, h: str, add: ast.BinOp) -> list[ast.stmt] | None:
        """Moves the sum, and the norm after the `if`, into both branches of the `if`.

        In each branch they then form a straight line (GPT-2's cross-attention).
        """
        end = _next_branch(block, at, h)
        if end is None or not isinstance(block[end], ast.If):
            return None
        branch = block[end]
        after = self._until_norm(block, end + 1)
        if after == end + 1 and not any(self.read.norm(n) for n in ast.walk(branch)):
            return None
        start = at - 1 if at and self.read.is_dropout(block[at - 1]) else at
        if not self._movable(branch.test, block[start:end]):
            start = at
        if not self._movable(branch.test, block[start:end]):
            self.stuck.add(block[at].lineno)
            return None
        before, behind = block[start:end], block[end + 1 : after]
        for name in ("body", "orelse"):
            statements = getattr(branch, name)
            tail = [] if statements and isinstance(statements[-1], JUMPS) else copy.deepcopy(behind)
            setattr(branch, name, [*copy.deepcopy(before), *statements, *tail])
        kept = [ast.copy_location(ast.Pass(), s) for s in before]
        return [*block[:start], *kept, branch, *block[after:]]

    def _movable(self, test: ast.expr, before: list[ast.stmt]) -> bool:
        return movable(
            test, before, self.read.own_names(), lambda call: self.read.dropout(call) is not None
        )

    def _until_norm(self, block: list, start: int) -> int:
        """The end of the plain statements from `start` to a norm; `start` if there is none."""
        for i in range(start, len(block)):
            if not is_simple(block[i]):
                break
            if any(self.read.norm(call) for call in calls(block[i])):
                return i + 1
        return start

    # Calls

    def _call(self, norm: ast.Call, add: Any, block: list, at: int) -> ast.Call:
        x, residual, dropout = self._operands(add, block, at)
        line, source = add.lineno, self.read.source(add)
        self.found.append(ResidualSum(line, source, self.read.norm(norm), dropout is not None))
        self.done.add(place(norm))
        operands = [copy.deepcopy(norm.func), x, residual, *([dropout] if dropout else [])]
        swapped = [ast.keyword("swapped", ast.Constant(True))] if residual is add.left else []
        return ast.copy_location(self.read.helper(HELPER, operands, swapped), add)

    def _operands(self, add: ast.BinOp, block: list, at: int) -> tuple:
        """(x, residual, dropout) of residual + dropout(x); removes a dropout statement."""
        both = (add.left, add.right), (add.right, add.left)
        for x, residual in both:
            drop = self.read.dropout(x)
            if drop and (x is add.left or dotted(residual)):  # else calls swap order
                return drop[0], residual, drop[1]
        for x, residual in both:
            name = dotted(x)
            if at and self.read.is_dropout(block[at - 1], name) and self.read.dies(name, block[at]):
                dropped, dropout = self.read.dropout(block[at - 1].value) or (x, None)
                block[at - 1] = ast.copy_location(ast.Pass(), block[at - 1])
                return dropped, residual, dropout
        return add.left, add.right, None

    # Sums that are not fused

    def _miss(self, statement: ast.stmt, h: str, add: ast.expr, user: ast.stmt | None) -> None:
        """Notes why a normed sum is not fused."""
        line = statement.lineno
        norm = self.read.norm_after(line, h)
        if not norm:
            return
        if user and line in self.stuck:
            reason = f"the condition of the `if` (line {user.lineno}) may depend on the sum"
        elif user and not mentions(user, {h}):
            reason = f"code between the sum and the norm (line {user.lineno}) may change the sum"
        elif user:
            reason = f"`{h}` is used between the sum and the norm (line {user.lineno})"
        else:
            reason = "the sum and the norm are not in the same block"
        self.found.append(ResidualSum(line, self.read.source(add), norm, reason=reason))

    def _note_in_place(self, statement: ast.stmt) -> None:
        match statement:
            case ast.AugAssign(target=ast.Name(id=h), op=ast.Add()):
                line, source = statement.lineno, self.read.source(statement)
                if norm := self.read.norm_after(line, h):
                    self.found.append(ResidualSum(line, source, norm, reason=IN_PLACE))


def _next_branch(block: list[ast.stmt], at: int, h: str) -> int | None:
    """The first compound statement that uses h; None if a plain one comes first."""
    same = {h}
    for i in range(at + 1, len(block)):
        copied = copied_name(block[i])
        used = mentions(block[i], same)
        if copied and copied[1] in same:
            same.add(copied[0])
        elif not is_simple(block[i]) and (used or same & stores(block[i])):
            return i
        elif used:
            return None
        else:
            same -= stores(block[i])
    return None


def sum_of(statement: ast.stmt) -> tuple[str, Any] | None:
    """("h", a + b) for `h = a + b` and for `h: Tensor = a + b`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=h)], value=add) if is_sum(add):
            return h, add
        case ast.AnnAssign(target=ast.Name(id=h), value=ast.BinOp() as add) if is_sum(add):
            return h, add
    return None


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


def movable(
    test: ast.expr,
    before: list[ast.stmt],
    local_names: set[str],
    harmless: Callable[[ast.Call], bool],
) -> bool:
    """Whether an `if` test gives the same result before these statements as after them.

    A call among them may change any object that it reaches. The test may then read no attribute, no
    container and only names in `local_names`. Of a name that the statements use, it may test only
    the identity. harmless: says which calls change nothing.
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
    local = local_names.issuperset(loads(test))
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
