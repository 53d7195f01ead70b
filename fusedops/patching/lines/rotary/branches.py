"""Checks that a few runs of a function show what it computes in every call.

if cos.dim() != 3: raise ...        the runs have the call's numbers of dimensions
if half: ...                        an option, which the runs had too
assert cos.shape == sin.shape       a comparison of sizes, whose failure raises
"""

import ast
import dis
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

from fusedops.patching.core.probing import closure_values
from fusedops.patching.core.source import Unreadable, parse
from fusedops.patching.lines.reader import dotted, stores

__all__ = ["BRANCHES", "unproven"]

BRANCHES = "it has branches, so one run does not show what every call computes"
FIXED = FunctionType, BuiltinFunctionType, ModuleType, type  # values assumed not to change
RANK, SIZE = "a number of dimensions", "a size or shape"
EXACT = ast.Eq, ast.NotEq
LARGEST = 4  # number in an expression of dimensions and parities, as in shape[3] and size % 2


def unproven(uses: list[FunctionType], options: set[str], fixed_ranks: bool) -> str:
    """Why runs do not show what these functions do in other calls; empty if they do.

    They may take a branch that the run did not take, or read a value that changes later. options:
    parameters that have the call's values in the runs. fixed_ranks: whether the runs have the
    call's numbers of dimensions.
    """
    for function in uses:
        instructions = list(_instructions(function.__code__))
        if any(map(_branches, instructions)) and not (fixed_ranks and _settled(function, options)):
            return BRANCHES
        names = {i.argval for i in instructions if i.opname == "LOAD_GLOBAL"}
        held = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
        for name, value in {**held, **closure_values(function)}.items():
            if not isinstance(value, FIXED):
                return f"it reads {name}, whose changes cannot be detected"
    return ""


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Instructions of the code and of code defined inside it, such as generators."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _branches(i: dis.Instruction) -> bool:
    """Whether an instruction compares or jumps, except for jumps on an omitted argument."""
    return i.opname == "COMPARE_OP" or ("_IF_" in i.opname and not i.opname.endswith("NONE"))


def _settled(function: FunctionType, options: set[str]) -> bool:
    """Whether ranks and options decide all branches, or a branch only raises."""
    try:
        tests = _Tests(parse(function), options)
    except Unreadable:
        return False
    return tests.are_settled()


class _Tests:
    def __init__(self, tree: ast.FunctionDef, options: set[str]) -> None:
        self.nodes, self.options = list(ast.walk(tree)), options
        arguments = tree.args
        given = *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs
        self.parameters = {a.arg for a in given}
        self.kinds: dict[str, str] = {}
        for _ in self.nodes:  # each pass may find the kinds of names made from those of the last
            before = dict(self.kinds)
            self._name()
            if before == self.kinds:
                break

    def _name(self) -> None:
        """Notes the kinds of local names that have the same kind in all assignments."""
        values: dict[str, set[str]] = {}
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[target], value=value):
                    kind = self.kind(value)
                case ast.comprehension(
                    target=ast.Tuple(elts=[ast.Name(id=at), ast.Name(id=size)]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[shape]),
                ) if self.kind(shape) == SIZE:
                    values.setdefault(at, set()).add(RANK)
                    values.setdefault(size, set()).add(SIZE)
                    continue
                case ast.AugAssign(target=target) | ast.For(target=target):
                    kind = ""
                case ast.comprehension(target=target) | ast.NamedExpr(target=target):
                    kind = ""
                case _:
                    continue
            unpacks = not isinstance(target, ast.Name) and kind
            for name in stores(target):
                values.setdefault(name, set()).add(SIZE if unpacks else kind)
        self.kinds = {
            name: next(iter(kinds))
            for name, kinds in values.items()
            if len(kinds) == 1 and name not in self.parameters
        }

    def kind(self, node: ast.expr) -> str:
        """RANK or SIZE for a value that is made of nothing else; empty for another."""
        match node:
            case ast.Constant(value=int(number)) if abs(number) <= LARGEST:
                return RANK
            case ast.Name(id=name):
                return self.kinds.get(name, "")
            case ast.Attribute(attr="ndim") | ast.Call(func=ast.Attribute(attr="dim"), args=[]):
                return RANK
            case ast.Attribute(value=value, attr="shape") if dotted(value):
                return SIZE
            case ast.Call(func=ast.Attribute(value=value, attr="size")) if dotted(value):
                return SIZE
            case ast.Call(func=ast.Name(id="len"), args=[value]) if self.kind(value):
                return RANK
            case ast.UnaryOp(operand=operand):
                return self.kind(operand)
            case ast.Subscript(value=value):
                return self.kind(value) and SIZE
            case ast.BinOp(left=left, right=right):
                return self._of([left, right])
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return self._of(elements)
        return ""

    def _of(self, nodes: list[ast.expr]) -> str:
        kinds = {self.kind(node) for node in nodes}
        return "" if "" in kinds else SIZE if SIZE in kinds else RANK

    def are_settled(self) -> bool:
        settled: set[ast.AST] = set()
        for node in self.nodes:
            match node:
                case ast.Assert(test=test):
                    ok = self._is_settled(test, raises=True)
                case ast.If(test=test, body=[ast.Raise()], orelse=[]):
                    ok = self._is_settled(test, raises=True)
                case ast.If(test=test) | ast.IfExp(test=test):
                    ok = self._is_settled(test, raises=False)
                case ast.While() | ast.Match() | ast.Try():
                    return False
                case ast.comprehension(ifs=[_, *_]):
                    return False
                case _:
                    continue
            if not ok:
                return False
            settled |= {*ast.walk(test)}
        branches = ast.Compare, ast.BoolOp
        return all(node in settled for node in self.nodes if isinstance(node, branches))

    def _is_settled(self, test: ast.expr, raises: bool) -> bool:
        """raises: whether one of the test's outcomes raises."""
        match test:
            case ast.Name(id=name):
                return name in self.options and name not in _assigned(self.nodes)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._is_settled(operand, raises)
            case ast.BoolOp(values=values):
                return all(self._is_settled(value, raises) for value in values)
            case ast.Compare(left=left, ops=ops, comparators=others):
                kind = self._of([left, *others])
                exact = all(isinstance(op, EXACT) for op in ops)
                return kind == RANK or (kind == SIZE and raises and exact)
        return False


def _assigned(nodes: list[ast.AST]) -> set[str]:
    return set().union(*(stores(node) for node in nodes if isinstance(node, ast.stmt)))
