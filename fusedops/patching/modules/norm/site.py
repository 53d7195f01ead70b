"""Norm sites: leaf modules that compute layer_norm or rms_norm, whatever their name."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch import is_autocast_enabled as autocast
from torch.amp import is_autocast_available

from fusedops.patching.core.introspection import MISSING
from fusedops.patching.core.swap import Unswappable, original_class, subclass, swap
from fusedops.patching.core.thresholds import inductor_fuses
from fusedops.patching.modules.norm.probe import Recipe, eps_names, probe
from fusedops.patching.report import PatchReport, Site

__all__ = ["looks_like_a_norm", "patch_norms", "recipe_of", "row_major"]

USUAL = "cpu", "cuda"


def find_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each norm-like module once, even if it has two names."""
    for path, module in model.named_modules():
        if looks_like_a_norm(module):
            yield path, module


def looks_like_a_norm(module: nn.Module) -> bool:
    """Whether the module is a leaf with an eps, or has norm in a class name."""
    if recipe_of(module) is not None:  # may not be a leaf if parametrized later
        return True
    if any(name != "parametrizations" for name, _ in module.named_children()):
        return False
    return _is_named_norm(module) or bool(eps_names(module))


def _is_named_norm(module: nn.Module) -> bool:
    return any("norm" in cls.__name__.lower() for cls in type(module).__mro__)


def patch_norms(model: nn.Module, report: PatchReport) -> None:
    """Swaps every norm module that a fused function equals."""
    for path, module in list(find_norms(model)):
        was = original_class(module).__name__
        outcome = _patch_norm(module)
        if isinstance(outcome, Recipe):
            report.fused.append(Site(path, "norm", was, str(outcome.formula)))
        elif _is_named_norm(module) or module._parameters:  # CosineSimilarity has an eps too
            report.skipped.append(Site(path, "norm", was, reason=outcome))


def _patch_norm(module: nn.Module) -> Recipe | str:
    """The recipe with which the module is now fused, or why it is not."""
    if "forward" in vars(module):
        return "the instance has its own forward"
    found = recipe_of(module) or probe(module)
    if isinstance(found, Recipe):
        try:
            swap(module, functools.partial(_fused, recipe=found))
        except Unswappable as why:
            return str(why)
    return found


def recipe_of(module: nn.Module) -> Any:
    """The module's recipe; None if it is not fused."""
    state = getattr(type(module), "_fusedops", None)
    return None if state is None else state.recipe


def _fused(original: type[nn.Module], recipe: Recipe) -> type:
    return subclass(original, recipe, lambda: _methods(original, recipe))


def _methods(original: type[nn.Module], recipe: Recipe) -> tuple[dict, dict]:
    """The fused forward; and for the class's state, the recipe and the norm of a sum."""
    operands, keeps_strides = _operands(recipe), recipe.keeps_strides
    norm, norm_of_sum = recipe.formula.fused, recipe.formula.fused_add

    @functools.wraps(original.forward)
    def forward(self, *args, **kwargs):
        if len(args) == 1 and not kwargs:
            x = args[0]
            found = operands(self, x)
            if found is not None:
                if not keeps_strides or x.is_contiguous():
                    return norm(x, *found)
                if order := _memory_order(x, len(found[0])):
                    y = norm(x.permute(order), *found)
                    return y.permute([order.index(i) for i in range(x.dim())])
        return original.forward(self, *args, **kwargs)

    def add(self, x, residual, dropout_p):
        found = operands(self, residual)  # h has its dtype
        return found and norm_of_sum(x, residual, *found[1:], dropout_p=dropout_p)

    return {"forward": forward}, {"recipe": recipe, "regimes": recipe.regimes, "add": add}


def _operands(recipe: Recipe) -> Callable[[nn.Module, Tensor], tuple | None]:
    """Returns a function that reads (shape, weight, [bias,] eps) from a module.

    It returns None in a regime that was not verified. It is optimised, as this is a patched small
    norm's only overhead: `self.weight` and `x.device` would each cost as much as the rest.
    """
    weight_name, bias_name, eps_name = recipe.weight, recipe.bias, str(recipe.eps)
    absent, fixed = recipe.absent, recipe.fixed
    fixed_eps = recipe.eps if isinstance(recipe.eps, float) else None
    has_bias = recipe.formula.function == "layer_norm"

    def operands(self, x):
        if type(x) is not Tensor or inductor_fuses(x):
            return None
        weight = bias = of_weight = None
        if weight_name:
            weight = self._parameters.get(weight_name)
            if weight is None:  # parametrized, or FSDP1's view
                weight = getattr(self, weight_name)
                if weight is None:
                    return None
            of_weight = weight.dtype
        device = "cpu" if x.is_cpu else x.device.type
        known = device in USUAL or is_autocast_available(device)  # meta has no autocast, and raises
        regime = x.dtype, of_weight, known and autocast(device) and device
        state = getattr(self, "_fusedops", None)  # None: a forward kept from before unpatch
        if state is None or regime not in state.regimes:
            return None
        for name in absent:
            if self._parameters.get(name) is not None:
                return None
        for name, value in fixed:
            if vars(self).get(name, MISSING) != value:
                return None
        eps = fixed_eps or getattr(self, eps_name)
        if type(eps) is not float and eps is not None:
            return None
        shape = recipe.shape or x.shape[-1:] if weight is None else weight.shape
        if not has_bias:
            return shape, weight, eps
        if bias_name:
            bias = self._parameters.get(bias_name)
            if bias is None:
                bias = getattr(self, bias_name)
                if bias is None:
                    return None
        return shape, weight, bias, eps

    return operands


def _memory_order(x: Tensor, normed: int) -> list[int] | None:
    """The dimensions in memory order; None if the normed ones are not innermost.

    An elementwise norm keeps its input's strides, and a later view may depend on them: for example
    a query [batch, head, token, n] stored as [batch, token, head, n].
    """
    rows = x.dim() - normed
    order: list[int] = []
    for i in range(rows):  # sorted() stops torch.compile where sizes are dynamic
        at = i
        while at and x.stride(order[at - 1]) < x.stride(i):
            at -= 1
        order.insert(at, i)
    order += range(rows, x.dim())
    return order if row_major(x.permute(order)) else None


def row_major(x: Tensor) -> bool:
    """Whether an elementwise result of x is contiguous: x is, or is a slice of such a tensor."""
    strides = x.stride()
    return all(strides[i] >= strides[i + 1] for i in range(x.dim() - 1))
