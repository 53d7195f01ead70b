"""Fuses an activation into the linear before it.

    self.act(self.fc(x))        _fusedops_activated(self, self.act, self.fc, x)

    h = self.fc(x)              h = _fusedops_activated(self, self.act, self.fc, x)
    h = self.act(h)                 or an expression that computes an activation of h

    nn.Sequential(fc, act)      its forward calls both together

Each call decides whether to run the fused function or the original lines: a linear or activation
with hooks is called.
"""

import ast
import copy
import functools
import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusedops.functional import linear
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.core.swap import active_state, has_hooks, original_class
from fusedops.patching.lines.layer import OFF, Kind, Outcome, lines_of, role_of
from fusedops.patching.lines.reader import (
    PARTIAL,
    Names,
    Reader,
    blocks,
    dotted,
    expressions,
    first_call,
    is_simple,
    replaced,
)
from fusedops.patching.modules.activation import (
    UNKNOWN_NOW,
    Activation,
    ActivationRef,
    WrittenActivation,
    activation_of,
    patch_activation,
)
from fusedops.patching.modules.linear import operands_of, patch_linear

__all__ = ["EPILOGUE", "WRITTEN", "pairs"]

HELPER, WRITTEN = "_fusedops_activated", "_fusedops_written"


@dataclass(frozen=True)
class Activated:
    """A linear and its activation. fc: the linear's name in the module."""

    fc: str
    act: ActivationRef


def rewrite(tree: ast.FunctionDef, names: Names) -> list[Activated]:
    """Rewrites `tree` in place. Returns the activated linears."""
    rewriter = _LinearRewriter(tree, names)
    for block in blocks(tree):
        for at in range(len(block)):
            rewriter.inline(block, at)
            rewriter.following(block, at)
    ast.fix_missing_locations(tree)
    return rewriter.found


class _LinearRewriter:
    def __init__(self, tree: ast.FunctionDef, names: Names) -> None:
        self.read = Reader(tree, names)
        self.found: list[Activated] = []

    def inline(self, block: list[ast.stmt], at: int) -> None:
        """act(fc(x)), anywhere in a simple statement."""
        if not is_simple(block[at]):
            return
        for act in [n for n in expressions(block[at]) if self.read.activation(n)]:
            fc: Any = act.args[0]  # type: ignore[attr-defined]
            if self.read.called("linear", fc):
                block[at] = replaced(block[at], act, self._call(act, fc))

    def following(self, block: list[ast.stmt], at: int) -> None:
        """`h = fc(x)`, if act(h) comes first in the next statement, the only reader of h."""
        match block[at]:
            case ast.Assign(targets=[ast.Name(id=h)], value=fc) if self.read.called("linear", fc):
                user = block[at + 1] if at + 1 < len(block) else ast.Pass()
            case _:
                return
        act: Any = first_call(user) if is_simple(user) else None
        activates_h = act and self.read.activation(act) and dotted(act.args[0]) == h
        new = self._call(act, fc) if activates_h and self.read.dies(h, user) else None
        written = self.read.written_activation(user, h) if act and not activates_h else None
        if written:
            act, activation, numbers = written
            ref = ActivationRef("", WrittenActivation(activation))
            new = self._joined(ref, _function_of(act, h, activation, numbers), fc)
        if new:
            block[at + 1] = replaced(user, act, new)
            block[at] = ast.copy_location(ast.Pass(), block[at])

    def _call(self, act: Any, fc: Any) -> ast.Call:
        name: Any = self.read.activation(act)
        return self._joined(name, self.read.function(act), fc)

    def _joined(self, ref: ActivationRef, function: ast.expr, fc: Any) -> ast.Call:
        self.found.append(Activated(self.read.called("linear", fc), ref))
        return self.read.helper(HELPER, [function, fc.func, fc.args[0]])


def _function_of(
    expression: ast.expr, name: str, activation: Activation, numbers: dict[str, float]
) -> ast.Call:
    """A call of `written` that makes an expression a function of a name.

    numbers: the global ones that it reads, as they were when it was found to be the activation.
    """
    given = ast.arguments([], [ast.arg(name)], None, [], [], None, [])
    run = ast.Lambda(given, copy.deepcopy(expression))
    before: Any = tuple(numbers.values())
    values = activation.name, activation.alpha, activation.cast, before
    now = ast.Tuple([ast.Name(number, ast.Load()) for number in numbers], ast.Load())
    operands = [run, now, *(ast.Constant(value) for value in values)]
    return ast.Call(ast.Name(WRITTEN, ast.Load()), operands, [])


def pairs(module: nn.Sequential) -> list[Activated]:
    """The linears in an nn.Sequential whose output goes to an activation only."""
    children = list(module.named_children())
    return [
        Activated(fc, ActivationRef(act))
        for (fc, linear), (act, activation) in itertools.pairwise(children)
        if role_of(fc, linear) == "linear" and role_of(act, activation) == "activation"
    ]


def judge(module: nn.Module, pair: Activated) -> Outcome | None:
    """None if only the linear can be fused, which is a site of its own."""
    activation, fc = patch_activation(pair.act.of(module)), getattr(module, pair.fc)
    if follow_class(module) or isinstance(activation, str) or not activation.linear_name:
        return None
    if has_hooks(fc) or patch_linear(fc):
        return None
    now = f"linear(activation={activation.linear_name!r})"
    return Outcome(original_class(fc).__name__, now, child=pair.fc)


def activated(layer: nn.Module, act: Any, fc: nn.Module, x: Tensor) -> Tensor:
    """act(fc(x)), called by a rewritten forward."""
    operands = operands_of(fc, x)  # first, as torch.compile guards every attribute that is read
    activation = activation_of(act, x) if operands and "epilogue" in lines_of(layer) else None
    if operands and activation and activation.linear_name and not has_hooks(fc):
        return linear(x, *operands, activation.linear_name)
    return act(fc(x))


@functools.wraps(nn.Sequential.forward)
def in_sequence(self: Any, input: Any) -> Any:
    """The forward of an nn.Sequential that calls a linear and its activation together."""
    modules = list(self._modules.values())
    while modules:
        fc, *modules = modules
        if modules and active_state(fc).form and active_state(modules[0]).activation:
            act, *modules = modules
            input = activated(self, act, fc, input)
        else:
            input = fc(input)
    return input


def written(
    run: Any, numbers: tuple, name: str, alpha: float, cast: bool, before: tuple
) -> WrittenActivation | Any:
    """An activation's expression as a function; called by a rewritten forward.

    numbers: the global ones that it reads. before: those with which it is the activation.
    """
    return WrittenActivation(Activation(name, alpha, cast), run) if numbers == before else run


def _why(layer: nn.Module, act: Any, fc: nn.Module, x: Tensor) -> str:
    """Why `activated` runs the original lines; empty if it does not."""
    if "epilogue" not in lines_of(layer):
        return OFF
    if not operands_of(fc, x):
        return "the linear has changed, or its input is not a plain tensor"
    if has_hooks(fc):
        return "the linear has hooks"
    activation = activation_of(act, x)
    return "" if activation and activation.linear_name else UNKNOWN_NOW


decides(
    activated,
    "linear",
    at=lambda layer, act, fc, x: fc,
    why=_why,
    repeat=lambda layer, act, fc, x: Repeat(activated, activated, (layer, act, fc, x), {}, (fc,)),
)

EPILOGUE = Kind(
    "epilogue",
    rank=2,
    needs=("linear",),
    rewrite=rewrite,
    helpers={HELPER: activated, PARTIAL: functools.partial, WRITTEN: written},
    judge=judge,
    unread=lambda roles, original: False,  # a linear is a site of its own
    reported="linear",
    callees=True,
    sequence=in_sequence,
    pairs=pairs,
)
