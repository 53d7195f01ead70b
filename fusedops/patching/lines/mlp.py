"""Fuses gated MLPs: an activation of one tensor times another.

    self.act(self.gate(x)) * self.up(x)        _fusedops_gated(self, self.act, gate=self.gate(x),
                                                               up=self.up(x))

    gate = self.act(self.gate(x))              gate = self.gate(x)
    up = self.up(x)                            up = self.up(x)
    x = gate * up                              x = _fusedops_gated(self, self.act, gate=gate, up=up)

    gate, up = x.chunk(2, dim=-1)              x = _fusedops_packed(self, self.act, gate_up=x)
    x = self.act(gate) * up

The linears are still called as modules. Each call decides whether to run the fused function or the
original lines.
"""

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.core.sharded import all_sharded
from fusedops.patching.lines.layer import OFF, Kind, Outcome, fuses
from fusedops.patching.lines.reader import (
    PARTIAL,
    Names,
    Reader,
    blocks,
    dotted,
    expressions,
    is_simple,
    loads,
    replaced,
    stores,
)
from fusedops.patching.modules.activation import (
    UNKNOWN_NOW,
    ActivationRef,
    activation_of,
    patch_activation,
)
from fusedops.patching.modules.norm.site import row_major

__all__ = ["MLP"]

GATED, PACKED = "_fusedops_gated", "_fusedops_packed"
FLOATS = torch.float32, torch.bfloat16, torch.float16
DTYPE = "its dtype is not float32, bfloat16 or float16"
STRIDED = "its rows are not contiguous, or it cannot be halved"


@dataclass(frozen=True)
class Product:
    """A gated product. source: its original text."""

    source: str
    act: ActivationRef


def rewrite(tree: ast.FunctionDef, names: Names) -> list[Product]:
    """Rewrites `tree` in place. Returns the gated products in source order."""
    rewriter = _MlpRewriter(tree, names)
    for block in blocks(tree):
        for at in range(len(block)):
            rewriter.statement(block, at)
    ast.fix_missing_locations(tree)
    return rewriter.found


class _MlpRewriter:
    def __init__(self, tree: ast.FunctionDef, names: Names) -> None:
        self.read = Reader(tree, names)
        self.found: list[Product] = []

    def statement(self, block: list[ast.stmt], at: int) -> None:
        """Rewrites the products of a simple statement, but not those of a test or iterator."""
        if not is_simple(block[at]):
            return
        for product in [n for n in expressions(block[at]) if _is_product(n)]:
            call = self._inline(block, at, product) or self._earlier(block, at, product)
            if call is not None:
                block[at] = replaced(block[at], product, call)

    def _inline(self, block: list[ast.stmt], at: int, product: Any) -> ast.Call | None:
        """act(gate) * up or up * act(gate). Keeps the evaluation order of gate and up."""
        for act, up in (product.left, product.right), (product.right, product.left):
            if self.read.activation(act) and self.read.made_by_call(up):
                gate = act.args[0]
                if self.read.changes_tensors(up):  # perhaps the gate, before its activation
                    return None
                if at and self._unpacks(block[at - 1], gate, up, block[at]):
                    block[at - 1] = _unsplit(block[at - 1])
                    return self._call(
                        PACKED, product, act, [ast.keyword("gate_up", gate)], act is product.left
                    )
                return self._gated(product, act, gate, up, act is product.left)
        return None

    def _unpacks(self, before: ast.stmt, gate: Any, up: Any, user: ast.stmt) -> bool:
        """Whether `before` is `gate, up = packed.chunk(2, dim=-1)`, used only by this product."""
        match before:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])],
                value=ast.Call(func=ast.Attribute(attr="chunk"), args=args, keywords=keywords),
            ) if (first, second) == (dotted(gate), dotted(up)):
                given = [ast.unparse(a) for a in args], [ast.unparse(k) for k in keywords]
                halves = given in ((["2"], ["dim=-1"]), (["2", "-1"], []))
                return halves and self.read.dies(first, user) and self.read.dies(second, user)
        return False

    def _earlier(self, block: list[ast.stmt], at: int, product: Any) -> ast.Call | None:
        """A product of a name that an activation assigned earlier in the same block."""
        if self.read.changes_tensors(block[at]):
            return None
        for side, other in (product.left, product.right), (product.right, product.left):
            assignment = self._activation_of_call(block, at, dotted(side))
            apart = dotted(other) != dotted(side) and self.read.made_by_call(other)
            if assignment is not None and apart:
                act: Any = copy.copy(assignment.value)
                assignment.value = act.args[0]
                return self._gated(product, act, side, other, side is product.left)
        return None

    def _activation_of_call(self, block: list[ast.stmt], at: int, name: str) -> ast.Assign | None:
        """The earlier `name = act(call)`, if only this statement reads the name, once.

        No statement in between may mutate the inner call's result.
        """
        for statement in reversed(block[:at]):
            match statement:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    activated = self.read.activation(value) and isinstance(value.args[0], ast.Call)  # type: ignore[attr-defined]
                    return statement if activated and self.read.dies(name, block[at]) else None
            used = name in loads(statement) or name in stores(statement)
            if used or self.read.changes_tensors(statement):
                return None
        return None

    def _gated(self, product: Any, act: Any, gate: Any, up: Any, first: bool) -> ast.Call:
        operands = [ast.keyword("gate", gate), ast.keyword("up", up)]
        return self._call(GATED, product, act, operands if first else operands[::-1], first)

    def _call(self, helper: str, product: Any, act: Any, operands: list, first: bool) -> ast.Call:
        name: Any = self.read.activation(act)
        self.found.append(Product(self.read.source(product), name))
        swapped = [] if first else [ast.keyword("swapped", ast.Constant(True))]
        return self.read.helper(helper, [self.read.function(act)], [*operands, *swapped])


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _unsplit(unpacks: Any) -> ast.Assign:
    """Turns `gate, up = packed.chunk(2, dim=-1)` into `gate = packed`."""
    whole = ast.Assign([unpacks.targets[0].elts[0]], unpacks.value.func.value)
    return ast.copy_location(whole, unpacks)


def judge(module: nn.Module, product: Product) -> Outcome:
    activation = patch_activation(product.act.of(module))
    activation = follow_class(module) or activation
    if isinstance(activation, str):
        return Outcome(product.source, reason=activation)
    if activation.gated is None:
        reason = f"there is no fused gated function for {activation.name}"
        return Outcome(product.source, reason=reason)
    return Outcome(product.source, activation.gated_name)


def may_be_mlp(roles: list[str], original: type[nn.Module]) -> bool:
    """Whether a module has an activation and two linears."""
    return "activation" in roles and roles.count("linear") > 1


def gated(layer: nn.Module, act: Any, gate: Tensor, up: Tensor, swapped: bool = False) -> Tensor:
    """act(gate) * up, or up * act(gate) if swapped; called by a rewritten forward."""
    fused = None if _why_unequal(gate, up) else _function(layer, act, gate)
    return fused(gate, up) if fused else _lines(act, gate, up, swapped)


def packed(layer: nn.Module, act: Any, gate_up: Tensor, swapped: bool = False) -> Tensor:
    """Like `gated`, for a tensor with gate and up side by side in its last dimension."""
    fused = None if _why_unhalved(gate_up) else _function(layer, act, gate_up)
    if fused:
        return fused(gate_up, None)
    gate, up = gate_up.chunk(2, dim=-1)
    return _lines(act, gate, up, swapped)


def _lines(act: Any, gate: Tensor, up: Tensor, swapped: bool) -> Tensor:
    return up * act(gate) if swapped else act(gate) * up


def _function(layer: nn.Module, act: Any, gate: Tensor) -> Callable[..., Tensor] | None:
    """The activation's fused function; None if the original lines must run."""
    if not fuses(layer, "mlp", gate):
        return None
    activation = activation_of(act, gate)
    return activation.gated if activation else None


def _why_unequal(gate: Tensor, up: Tensor) -> str:
    """Why gate and up run the original lines; empty if they do not."""
    if not (type(gate) is type(up) is Tensor or all_sharded(gate, up)):
        return "gate and up are not plain tensors"
    if not (_has_plain_rows(gate) and _has_plain_rows(up)):
        return STRIDED if {gate.dtype, up.dtype} <= {*FLOATS} else DTYPE
    same = gate.dtype == up.dtype and gate.shape == up.shape and gate.device == up.device
    return "" if same else "gate and up differ in dtype, shape or device"


def _why_unhalved(gate_up: Tensor) -> str:
    if not (type(gate_up) is Tensor or all_sharded(gate_up)):
        return "gate and up are not a plain tensor"
    if _has_plain_rows(gate_up) and gate_up.shape[-1] % 2 == 0:
        return ""
    return STRIDED if gate_up.dtype in FLOATS else DTYPE


def _has_plain_rows(t: Tensor) -> bool:
    """Whether the result's contiguous rows match t's: a later view may depend on them."""
    strided = t.layout is torch.strided and not t.is_nested
    return strided and t.dtype in FLOATS and t.dim() > 0 and row_major(t)


def _why_no_function(layer: nn.Module, act: Any, gate: Tensor) -> str:
    if not fuses(layer, "mlp", gate):
        return OFF
    return "" if _function(layer, act, gate) else UNKNOWN_NOW


def _why_gated(layer: nn.Module, act: Any, gate: Tensor, up: Tensor, swapped: bool = False) -> str:
    return _why_unequal(gate, up) or _why_no_function(layer, act, gate)


def _why_packed(layer: nn.Module, act: Any, gate_up: Tensor, swapped: bool = False) -> str:
    return _why_unhalved(gate_up) or _why_no_function(layer, act, gate_up)


def _layer(layer: nn.Module, *operands: Any, **kwargs: Any) -> nn.Module:
    return layer


def _repeat(function: Callable[..., Tensor], *operands: Any, **kwargs: Any) -> Repeat:
    return Repeat(function, function, operands, kwargs)


decides(gated, "mlp", at=_layer, why=_why_gated, repeat=partial(_repeat, gated))
decides(packed, "mlp", at=_layer, why=_why_packed, repeat=partial(_repeat, packed))

MLP = Kind(
    "mlp",
    rank=1,
    needs=("linear", "adapter"),
    rewrite=rewrite,
    helpers={GATED: gated, PACKED: packed, PARTIAL: partial},
    judge=judge,
    unread=may_be_mlp,
    reported="mlp",
    callees=True,
)
