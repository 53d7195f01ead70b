"""Finds linear layers (nn.Linear and equivalent modules), and fuses them where that is faster."""

import functools
import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fusedops.functional import linear
from fusedops.nn import QuantizedLinear
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.core.probing import (
    F64,
    MISSING,
    attributes_read,
    bare,
    changes_state,
    quiet,
    undisturbed,
)
from fusedops.patching.core.sharded import all_sharded, local
from fusedops.patching.core.swap import (
    Unswappable,
    active_state,
    original_class,
    subclass,
    swap,
    version,
)
from fusedops.patching.core.thresholds import inductor_multiplies, linear_loses
from fusedops.patching.report import PatchReport, Site

__all__ = ["LinearForm", "form_of", "is_linear", "operands_of", "patch_linear", "patch_linears"]

PLAIN = nn.Parameter, Tensor
FORWARD = nn.Linear.forward  # torch's, before anyone replaces it


@dataclass(frozen=True)
class LinearForm:
    """x @ weight.T + bias, or x @ weight + bias if transposed.

    fixed: the attributes that the module's code reads, as they were when it was probed.
    """

    transposed: bool = False
    fixed: tuple[tuple[str, Hashable], ...] = ()

    def operands(self, module: nn.Module, x: Any) -> tuple[Tensor, Tensor | None] | None:
        """(weight, bias) for `linear`; None if the module's own code has to run.

        Reads `_parameters` directly: this is a patched small linear's only overhead.
        """
        held = module._parameters
        weight, bias = held.get("weight"), held.get("bias")
        plain = type(x) is Tensor and (bias is None or type(bias) in PLAIN) and not x.is_nested
        plain = plain and type(weight) in PLAIN
        if not (plain or all_sharded(x, weight, bias)) or weight is None or "bias" not in held:
            return None  # a missing parameter is computed in each call
        if self.fixed and any(vars(module).get(k, MISSING) != value for k, value in self.fixed):
            return None
        return (weight.t() if self.transposed else weight), bias


# class -> (its version, its attributes) -> its form
_forms: "WeakKeyDictionary[type, dict[Hashable, LinearForm | None]]" = WeakKeyDictionary()


def is_linear(module: nn.Module) -> bool:
    return form_of(module) is not None


def patch_linears(model: nn.Module, report: PatchReport) -> None:
    """Swaps linears whose fused function is faster here. Skips those already in the report."""
    done = {site.path for site in report.fused if site.kind == "linear"}
    for path, module in list(model.named_modules()):
        form, was = form_of(module), original_class(module).__name__
        if isinstance(module, QuantizedLinear):
            continue  # has its own kernels
        if path in done or (form is None and not isinstance(module, nn.Linear)):
            continue
        if form is not None and (slower := linear_loses(local(module.weight), form.transposed)):
            report.kept.append(Site(path, "linear", was, reason=slower))
        elif reason := patch_linear(module):
            report.skipped.append(Site(path, "linear", was, reason=reason))
        else:
            report.fused.append(Site(path, "linear", was, "linear"))


def patch_linear(module: nn.Module) -> str:
    """Gives the module its fused forward. Returns why it cannot; empty on success."""
    form = form_of(module)
    if reason := follow_class(module):
        return reason
    if form is None:
        return "it does not compute x @ weight.T + bias"
    try:
        swap(module, functools.partial(_fused, form=form))
    except Unswappable as why:
        return str(why)
    return "" if active_state(module).form else "another library has wrapped its class"


def operands_of(module: nn.Module, x: Any) -> tuple[Tensor, Tensor | None] | None:
    """The operands of `linear` for the module now; None if its own code has to run."""
    form = active_state(module).form
    operands = form and form.operands(module, x)
    if operands and inductor_multiplies(x, operands[0], form.transposed):
        return None
    return operands


def _itself(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return module


def _repeat(module: nn.Module, *args: Any, **kwargs: Any) -> Repeat:
    return Repeat(operator.call, operator.call, (module, *args), kwargs, (module,))


def _why(module: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Why a fused linear runs its own code; empty if it does not."""
    if len(args) != 1 or kwargs:
        return "it is not called with one positional argument"
    if not (type(args[0]) is Tensor or all_sharded(args[0])) or args[0].is_nested:
        return "its input is not a plain tensor"
    return "" if operands_of(module, args[0]) else "its weight, bias or attributes changed"


def _fused(original: type[nn.Module], form: LinearForm) -> type:
    @functools.wraps(original.forward)
    def forward(self, *args, **kwargs):
        operands = operands_of(self, args[0]) if len(args) == 1 and not kwargs else None
        return linear(args[0], *operands) if operands else original.forward(self, *args, **kwargs)

    decides(forward, "linear", at=_itself, why=_why, repeat=_repeat)
    return subclass(original, form, lambda: ({"forward": forward}, {"form": form}))


def form_of(module: nn.Module) -> LinearForm | None:
    """The module's linear form; None if it is not a linear or has no weight yet."""
    if isinstance(module, torch.jit.ScriptModule) or not _is_matrix_and_row(module):
        return None
    original = original_class(module)
    if original.forward is FORWARD and _keeps_code_of_linear(original):
        return LinearForm()
    module = bare(module)
    module.__class__ = original
    attributes = attributes_read(module, {"weight", "bias"})
    if isinstance(attributes, str) or changes_state(original):
        return None
    cached, key = _forms.setdefault(original, {}), (version(original), attributes)
    if key not in cached:
        tried = (transposed for transposed in (False, True) if _is_product(module, transposed))
        cached[key] = next((LinearForm(transposed, attributes) for transposed in tried), None)
    return cached[key]


def _keeps_code_of_linear(original: type) -> bool:
    """Whether no subclass of nn.Linear redefines the parameters or the call."""
    bases = original.__mro__
    if nn.Linear not in bases or nn.Linear.forward is not FORWARD:
        return False
    redefined = {name for base in bases[: bases.index(nn.Linear)] for name in vars(base)}
    return redefined.isdisjoint(("weight", "bias", "__call__", "__getattr__", "__getattribute__"))


def _is_matrix_and_row(module: nn.Module) -> bool:
    """Whether the module holds just a matrix and a vector as long as one of its sides."""
    held: dict = module._parameters
    if any(isinstance(p, UninitializedParameter) for p in held.values()):
        return False
    if held.keys() != {"weight", "bias"} or module._modules or module._buffers:
        return False
    weight, bias = held["weight"], held["bias"]
    sides = () if weight is None or weight.dim() != 2 else weight.shape
    return bool(sides) and (bias is None or (bias.dim() == 1 and len(bias) in sides))


def _is_product(module: Any, transposed: bool) -> bool:
    """Whether the module computes x @ weight.T + bias (transposed: x @ weight + bias).

    Tested on random parameters: small ones, unless its code needs the real size.
    """
    shape = tuple(module.weight.shape)
    small = (min(shape[0], 24), min(shape[1], 24 if shape[0] == shape[1] else 40))
    return any(
        _is_product_of(bare(module), size, transposed) for size in dict.fromkeys((small, shape))
    )


def _is_product_of(module: Any, shape: tuple[int, ...], transposed: bool) -> bool:
    depth, width = shape if transposed else shape[::-1]
    draw = functools.partial(torch.randn, dtype=F64, device="cpu", requires_grad=True)
    try:
        with undisturbed(), quiet("cpu"):
            torch.manual_seed(0)
            x, weight, bias = draw(2, 3, depth), draw(*shape), draw(width)
            parameters = {"weight": weight, "bias": None if module.bias is None else bias}
            vars(module)["_parameters"] = parameters
            expected = x @ (weight if transposed else weight.T)
            expected = expected if parameters["bias"] is None else expected + bias
            leaves = [t for t in (x, *parameters.values()) if t is not None]
            return _agree(module(x), expected, leaves)
    except Exception:  # noqa: BLE001  a model's own code raises anything
        return False


def _agree(got: Tensor, expected: Tensor, leaves: list[Tensor]) -> bool:
    """Whether two results and their gradients are equal."""
    if got.shape != expected.shape:
        return False
    down = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad(y, leaves, down) for y in (got, expected)), strict=True)
    return all(torch.allclose(a, b) for a, b in [(got, expected), *pairs])
