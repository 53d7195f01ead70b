"""Rewrites attention in a function's syntax tree: torch's function, or its lines written out.

    F.scaled_dot_product_attention(q, k, v)     _fusedops_sdpa(
                                                    self, F.scaled_dot_product_attention, q, k, v)

    w = q @ k.transpose(-2, -1) * scale         w = _fusedops_step(self, "*", _fusedops_scores(
                                                    self, "@", q, k.transpose(-2, -1)), scale)
    w = w.masked_fill(mask, -inf)               w = _fusedops_step(self, ".masked_fill", w, mask,
                                                    -inf)
    y = F.softmax(w, dim=-1) @ v                y = _fusedops_step(self, "@", _fusedops_step(
                                                    self, F.softmax, w, dim=-1), v)

The new lines evaluate every operand where the old ones did. Scores are rewritten only if no other
code can see them: each use is an operation that `_fusedops_step` gets, from the product of queries
and keys to the product with the values.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import basename
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fusedops.patching.core.source import Unreadable, parse, rebuild_function
from fusedops.patching.lines.attention.memory import with_rows
from fusedops.patching.lines.attention.steps import (
    CASTS,
    DROPS,
    FUNCTIONS,
    IN_PLACE,
    PRODUCTS,
    SOFTENS,
    STEPS,
    step,
)
from fusedops.patching.lines.code import add_layer, names_in
from fusedops.patching.lines.reader import (
    Names,
    Reader,
    changes_tensors,
    is_simple,
    loads,
    mentions,
    place,
    replaced,
    stores,
)

__all__ = ["BEGIN", "SDPA", "SDPA_CALL", "STEP", "WRITTEN", "AttentionLines", "rewrite"]

SDPA, BEGIN, STEP = "_fusedops_sdpa", "_fusedops_scores", "_fusedops_step"
SDPA_CALL, WRITTEN = "F.scaled_dot_product_attention", "softmax attention"

BINARY = {ast.MatMult: "@", ast.Mult: "*", ast.Div: "/", ast.Add: "+"}
CHILDREN = {"dropout": nn.Dropout, "softmax": nn.Softmax}
SHAPES = {"shape", "dtype", "device", "ndim"}  # attributes of Scores
SIZES = {"size", "dim"}  # its methods
SCORES, WEIGHTS, GONE = "scores", "weights", "gone"  # what a name holds; weights are a softmax
JUMPS = ast.Return, ast.Raise, ast.Continue, ast.Break

Env = dict[str, str]


@dataclass(frozen=True)
class AttentionLines:
    """Attention in a function's code. name: torch's function, or what is written out.

    file, line: of that function's call, or of the softmax. reason: why the lines stay as written;
    then line is that of the function that has them.
    """

    name: str
    file: str
    line: int
    reason: str = ""

    @property
    def was(self) -> str:
        written = " written out" if self.name == WRITTEN else ""
        return f"{self.name}{written}, {basename(self.file)}:{self.line}"


class _Exposed(Exception):
    """Why scores cannot stay uncomputed: other code may see them."""


def rewrite(tree: ast.FunctionDef, names: Names) -> list[AttentionLines]:
    """Rewrites `tree` in place. Returns its attention; at most one that stays as written."""
    read = Reader(tree, names)
    sites = [*_rewrite_calls(tree, read)]
    reason = ""
    starts: list[Any] = [node for node in ast.walk(tree) if _is_product(read, node)]
    # The product with values ends after that of queries and keys, whose reason counts.
    for start in sorted(map(place, starts), key=lambda at: at[2:]):
        lines = _ScoreRewriter(read, start)
        body = copy.deepcopy(tree.body)
        try:
            body, _ = lines.block(body, {})
        except _Exposed as why:
            reason = reason or str(why)
            continue
        if lines.products:
            tree.body = with_rows(body, lines.products)
            sites.append(AttentionLines(WRITTEN, names.file, lines.softmax))
    if reason and not any(site.name == WRITTEN for site in sites):
        sites.append(AttentionLines(WRITTEN, names.file, tree.lineno, reason))
    ast.fix_missing_locations(tree)
    return sites


def _rewrite_calls(tree: ast.FunctionDef, read: Reader) -> Iterator[AttentionLines]:
    for node in list(ast.walk(tree)):
        match node:
            case ast.Call(func=func) if read.meaning(func) is F.scaled_dot_product_attention:
                node.args[:0] = [ast.Name(read.self_name, ast.Load()), func]
                node.func = ast.copy_location(ast.Name(SDPA, ast.Load()), func)
                yield AttentionLines(SDPA_CALL, read.names.file, node.lineno)


class _Operation(NamedTuple):
    """how: what `STEPS` knows it by. first: the expression of that."""

    how: Any
    first: ast.expr
    operands: list[ast.expr]
    keywords: list[ast.keyword]


def _operation(read: Reader, node: ast.AST) -> _Operation | None:
    """An expression that may be one of `STEPS`."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if how := BINARY.get(type(op)):
            return _Operation(how, ast.Constant(how), [left, right], [])
        case ast.Call(func=func, args=args, keywords=keywords):
            starred = any(isinstance(argument, ast.Starred) for argument in args)
            if starred or any(keyword.arg is None for keyword in keywords):
                return None
            if role := CHILDREN.get(read.names.roles.get(read.submodule(func), "")):
                return _Operation(role, func, args, keywords)
            function: Any = read.meaning(func)
            if getattr(function, "__hash__", None) and function in STEPS:
                if function is torch.einsum and len(args) == 2:
                    args = [args[0], *getattr(args[1], "elts", args[1:])]
                return _Operation(function, func, args, keywords)
            if function is None and isinstance(func, ast.Attribute) and f".{func.attr}" in STEPS:
                how = f".{func.attr}"
                return _Operation(how, ast.Constant(how), [func.value, *args], keywords)
    return None


def _is_product(read: Reader, node: ast.AST) -> bool:
    operation = _operation(read, node)
    return operation is not None and operation.how in PRODUCTS and not operation.keywords


class _ScoreRewriter:
    """Rewrites the operations on the scores that one product, at `start`, begins.

    An environment says which names hold scores, weights, or one of both (GONE), which no code may
    read. products: the calls that multiply weights with values. softmax: its line.
    """

    def __init__(self, read: Reader, start: tuple) -> None:
        self.read, self.start = read, start
        self.products: list[ast.Call] = []
        self.softmax = 0
        self.held: set[str] = set()  # names in the operands so far
        self.returned: set[str] | None = None  # what a function of scores returns

    # Statements

    def block(self, statements: list[ast.stmt], env: Env) -> tuple[list[ast.stmt], Env]:
        done: list[ast.stmt] = []
        for statement in statements:
            rewritten, env = self.statement(statement, env)
            done.append(rewritten)
        return done, env

    def statement(self, statement: Any, env: Env) -> tuple[ast.stmt, Env]:
        if isinstance(statement, ast.Return) and self.returned is not None:
            statement.value, state = self.value(statement.value, env)
            self.returned.add(state)
            return statement, env
        if not self.touches(statement, env):
            self.must_change_nothing(statement, env)
            return statement, _without(env, statement)
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self.must_change_nothing(statement, env)
                statement.value, state = self.value(value, env, name)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if name in env:
                how = f"{BINARY.get(type(op), '')}="
                old = ast.Name(name, ast.Load())
                operation = _Operation(how, ast.Constant(how), [old, value], [])
                result, state = self.step(operation, statement, env)
                statement = _assigned(name, result, statement)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if (
                name in env
            ):
                result, state = self.value(statement.value, env, name)
                statement = _assigned(name, result, statement)
            case ast.If():
                return self.branches(statement, env)
            case ast.With():
                return self.inside(statement, env)
            case _ if is_simple(statement):
                self.must_change_nothing(statement, env)
                self.parts(statement, env)
                return statement, _without(env, statement)
            case _:
                raise _Exposed(f"line {statement.lineno} begins a form that is not read")
        if state and name not in self.read.local_names:
            raise _Exposed(f"`{name}` is not a local name")
        return statement, _without(env, statement) | ({name: state} if state else {})

    def branches(self, statement: ast.If, env: Env) -> tuple[ast.stmt, Env]:
        statement.test, state = self.value(statement.test, env)
        self.must_be_plain(state, statement.test)
        ends: list[Env] = []
        for name in ("body", "orelse"):
            body, after = self.block(getattr(statement, name), env)
            setattr(statement, name, body)
            if not (body and isinstance(body[-1], JUMPS)):
                ends.append(after)
        states: dict[str, set[str]] = {}
        for name, state in (item for after in ends for item in after.items()):
            states.setdefault(name, set()).add(state)
        return statement, {n: s.pop() if len(s) == 1 else GONE for n, s in states.items()}

    def inside(self, statement: ast.With, env: Env) -> tuple[ast.stmt, Env]:
        """Scores neither enter nor leave a context, which may be autocast's."""
        for item in statement.items:
            self.parts(item, env)
        statement.body, after = self.block(statement.body, dict.fromkeys(env, GONE))
        return statement, _without(env, statement) | dict.fromkeys(after.keys() - env.keys(), GONE)

    def touches(self, node: ast.AST, env: Env) -> bool:
        """Whether a node has a name of the environment or the first product."""
        return any(
            (isinstance(n, ast.Name) and n.id in env) or self.is_start(n) for n in ast.walk(node)
        )

    def is_start(self, node: Any) -> bool:
        is_operation = isinstance(node, ast.BinOp | ast.Call)
        return is_operation and place(node) == self.start and _is_product(self.read, node)

    # Expressions

    def value(self, node: Any, env: Env, target: str = "") -> tuple[Any, str]:
        """Rewrites an expression's operations on scores. Returns it, and whether it gives scores.

        target: the name that gets the value, whose scores an operation may change in place.
        """
        if not self.touches(node, env):
            return node, ""
        operation = _operation(self.read, node)
        match node:
            case ast.Name(id=name):
                if env[name] == GONE:
                    raise _Exposed(
                        f"line {node.lineno} uses its scores outside of the block that makes them"
                    )
                return node, env[name]
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in env:
                if attr in SHAPES and env[name] != GONE:
                    return node, ""
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if (
                attr in SIZES and name in env and env[name] != GONE
            ):
                for argument in node.args:
                    self.parts(argument, env)
                return node, ""
            case ast.IfExp(test=test):
                node.test, state = self.value(test, env)
                self.must_be_plain(state, node)
                node.body, state = self.value(node.body, env)
                node.orelse, other = self.value(node.orelse, env)
                self.must_be_plain("" if state == other else "scores", node)
                return node, state
        if self.is_start(node):
            return self.begin(operation, node, env)
        if operation:
            changed = operation.operands[0] if operation.how in IN_PLACE else None
            if isinstance(changed, ast.Name) and changed.id != target:
                self.must_be_plain("scores", node)
            return self.step(operation, node, env)
        match node:
            case ast.Call(func=func) if isinstance(
                function := self.read.meaning(func), FunctionType
            ):
                return self.through(function, node, env)
        self.parts(node, env)
        return node, ""

    def through(self, function: Any, node: ast.Call, env: Env) -> tuple[Any, str]:
        """A function of the model that changes scores, such as one that adds a mask."""
        values = [self.value(argument, env) for argument in node.args]
        for keyword in node.keywords:
            keyword.value, state = self.value(keyword.value, env)
            self.must_be_plain(state, node)
        at = [i for i, (_, state) in enumerate(values) if state]
        node.args = [value for value, _ in values]
        if not at:
            return node, ""
        starred = any(isinstance(value, ast.Starred) for value in node.args)
        if len(at) > 1 or starred or not (state := _over_scores(function, at[0], values[at[0]][1])):
            self.must_be_plain("scores", node)
        call = self.read.helper(STEP, [node.func, *node.args], node.keywords)
        return ast.copy_location(call, node), state

    def parts(self, node: ast.AST, env: Env) -> None:
        """Rewrites the expressions in a node that is not read; none may give scores."""
        if isinstance(node, ast.Name) and node.id in env and isinstance(node.ctx, ast.Load):
            self.must_be_plain(env[node.id], node)
        for field, children in ast.iter_fields(node):
            for child in children if isinstance(children, list) else [children]:
                if isinstance(child, ast.expr):
                    rewritten, state = self.value(child, env) if _is_load(child) else (child, "")
                    self.must_be_plain(state, node)
                    _put(node, field, child, rewritten)
                elif isinstance(child, ast.AST):
                    self.parts(child, env)

    def must_change_nothing(self, statement: ast.stmt, env: Env) -> None:
        """Refuses a change in place of a tensor that scores hold until they are computed."""
        live = any(state != GONE for state in env.values())
        if live and changes_tensors(statement) and mentions(statement, self.held):
            raise _Exposed(f"line {statement.lineno} may change one of its tensors in place")

    def must_be_plain(self, state: str, node: ast.AST) -> None:
        if state:
            raise _Exposed(f"`{self.text(node)}` uses its {state}")

    def text(self, node: Any) -> str:
        """The text of a node before any of it was rewritten."""
        nodes: Any = (n for n in ast.walk(self.read.tree) if type(n) is type(node))
        same = (n for n in nodes if hasattr(node, "lineno") and place(n) == place(node))
        return ast.unparse(next(same, node))

    def begin(self, operation: Any, node: Any, env: Env) -> tuple[Any, str]:
        self.held = {name for operand in operation.operands for name in loads(operand)}
        for operand in operation.operands:
            self.must_be_plain("scores" if self.touches(operand, env) else "", node)
        call = self.read.helper(BEGIN, [operation.first, *operation.operands])
        return ast.copy_location(call, node), SCORES

    def step(self, operation: _Operation, node: Any, env: Env) -> tuple[Any, str]:
        how, first, operands, keywords = operation
        if how in IN_PLACE and self.returned is not None:  # the caller's scores would change too
            self.must_be_plain("scores", node)
        values = [self.value(operand, env) for operand in operands]
        for keyword in keywords:
            keyword.value, state = self.value(keyword.value, env)
            self.must_be_plain(state, node)
        states = [state for _, state in values if state]
        if not states:  # a product with values is in an operand
            for operand, (value, _) in zip(operands, values, strict=True):
                node = replaced(node, operand, value)
            return node, ""
        needed = WEIGHTS if how in PRODUCTS or how in DROPS else SCORES
        if how not in STEPS or len(states) > 1 or (how not in CASTS and states[0] != needed):
            self.must_be_plain(states[0], node)
        self.held |= {name for value, state in values if not state for name in loads(value)}
        call = self.read.helper(STEP, [first, *(value for value, _ in values)], keywords)
        ast.copy_location(call, node)
        if how in PRODUCTS:
            self.products.append(call)
            return call, ""
        if how in SOFTENS:
            self.softmax = node.lineno
            return call, WEIGHTS
        return call, states[0]


def _over_scores(function: FunctionType, at: int, state: str) -> str:
    """What a function gives for scores as its argument `at`; empty if they do not stay so.

    `step` calls a copy of it, which passes scores on uncomputed.
    """
    home = str(function.__module__).partition(".")[0]
    if home in ("torch", "fusedops") or hasattr(function, "__wrapped__"):
        return ""
    try:
        tree = parse(function)
        names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]
        add_layer(tree)
        lines = _ScoreRewriter(Reader(tree, names_in(function, frozenset())), ())
        lines.returned = set()
        tree.body, _ = lines.block(tree.body, {names[at]: state})
    except (Unreadable, IndexError, _Exposed):
        return ""
    if len(lines.returned) != 1 or lines.products or not isinstance(tree.body[-1], ast.Return):
        return ""
    ast.fix_missing_locations(tree)
    passing = rebuild_function(tree, function, {STEP: step})
    FUNCTIONS.setdefault(function, {})[at] = function.__code__, passing
    return lines.returned.pop()


def _without(env: Env, statement: ast.stmt) -> Env:
    """The environment without the names that a statement assigns or deletes."""
    gone = stores(statement)
    return {name: state for name, state in env.items() if name not in gone}


def _assigned(name: str, value: ast.expr, old: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), old)


def _is_load(node: Any) -> bool:
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load) or not isinstance(node, ast.Name)


def _put(node: Any, field: str, old: ast.expr, new: ast.expr) -> None:
    children = getattr(node, field)
    if isinstance(children, list):
        setattr(node, field, [new if child is old else child for child in children])
    else:
        setattr(node, field, new)
