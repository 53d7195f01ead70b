"""Finds leaf modules that compute layer_norm or rms_norm, and gives them a fused forward.

A norm's parts are recognised by their names, and its formula by running it.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import is_autocast_enabled as autocast
from torch.amp import is_autocast_available

from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.instance import follow_class
from fusedops.patching.core.probing import (
    BF16,
    F16,
    F32,
    F64,
    MISSING,
    attributes_read,
    device_of,
    undisturbed,
)
from fusedops.patching.core.sharded import all_sharded
from fusedops.patching.core.swap import (
    Unswappable,
    one_line,
    original_class,
    subclass,
    swap,
    version,
)
from fusedops.patching.core.thresholds import inductor_fuses
from fusedops.patching.modules.norm.samples import (
    FORMULAS,
    Formula,
    NormSamples,
    Regime,
    normalized_shape,
)
from fusedops.patching.report import PatchReport, Site

__all__ = ["looks_like_a_norm", "patch_norms", "recipe_of", "row_major"]

USUAL = "cpu", "cuda"
# In the names of norms over other dimensions than the last ones.
OTHER_NORMS = "batchnorm", "groupnorm", "instancenorm", "responsenorm"
USUAL_EPS = 1e-5, 1e-6, 1e-8, 1e-12
NOT_PLAIN = "its input is not a plain tensor"
CHANGED = "its attributes or parameters changed since patch"
UNPROVEN = "its dtypes were not seen to give the module's results"
STRIDED = "its input's rows are not contiguous"
REGIMES: list[Regime] = [
    *((x, x, False) for x in (F32, BF16, F16, F64)),
    *((x, F32, False) for x in (BF16, F16)),
    *((x, F32, True) for x in (F32, BF16, F16)),
]


@dataclass(frozen=True)
class Recipe:
    """How a fused function replaces a norm module's forward.

    weight, bias: parameter names, None if the module has none. eps: the attribute's name, or its
    value. shape: the normalized shape if no weight gives it, None for the last dimension. absent:
    names of parameters that the module could have but lacks. fixed: the other attributes that its
    code reads, with their values; if one changes, the original runs. regimes: (input dtype, weight
    dtype, device type under autocast, else False) for which the fused function was seen to equal
    the module. adds: the same holds for the fused function of a sum. mixes: and for a sum of
    bfloat16 and float32, with and without autocast. keeps_strides: whether the module's output is
    permuted in memory like its input; the fused output is always contiguous.
    """

    formula: Formula
    weight: str | None
    bias: str | None
    eps: str | float
    shape: tuple[int, ...] | None
    absent: tuple[str, ...]
    fixed: tuple[tuple[str, Hashable], ...]
    regimes: frozenset
    adds: bool
    mixes: bool
    keeps_strides: bool


def find_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each norm-like module once, even if it has two names."""
    for path, module in model.named_modules():
        if looks_like_a_norm(module):
            yield path, module


def looks_like_a_norm(module: nn.Module) -> bool:
    """Whether the module is a leaf with an eps, or has norm in a class name.

    A norm over other dimensions, such as BatchNorm or GroupNorm, is no site.
    """
    if recipe_of(module) is not None:  # may not be a leaf if parametrized later
        return True
    if any(other in name for name in _class_names(module) for other in OTHER_NORMS):
        return False
    if any(name != "parametrizations" for name, _ in module.named_children()):
        return False
    return _is_named_norm(module) or bool(eps_names(module))


def _is_named_norm(module: nn.Module) -> bool:
    return any("norm" in name for name in _class_names(module))


def _class_names(module: nn.Module) -> list[str]:
    return [cls.__name__.lower() for cls in type(module).__mro__]


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
    if reason := follow_class(module):
        return reason
    recipe = recipe_of(module) or probe(module)
    if isinstance(recipe, Recipe):
        try:
            swap(module, functools.partial(_fused, recipe=recipe))
        except Unswappable as why:
            return str(why)
    return recipe


# What a module computes


_recipes: "WeakKeyDictionary[type, dict[Hashable, Recipe | str]]" = WeakKeyDictionary()


def probe(module: nn.Module) -> Recipe | str:
    """The module's recipe, or the reason why no fused function can replace it."""
    try:
        with undisturbed():
            return _recipe_for(module)
    except Exception as error:  # noqa: BLE001  a model's own code raises anything
        return f"probing it failed: {one_line(error)}"


def _recipe_for(module: nn.Module) -> Recipe | str:
    anatomy = _anatomy(module)
    if isinstance(anatomy, str):
        return anatomy
    key = _signature(module)
    recipes = _recipes.setdefault(type(module), {})
    if key is None:
        return _classify(module, *anatomy)
    if key not in recipes:
        recipes[key] = _classify(module, *anatomy)
    return recipes[key]


def _classify(
    module: nn.Module, parameters: Sequence[tuple[str | None, str | None]], eps: Sequence
) -> Recipe | str:
    """Tries each (weight, bias) with each eps."""
    tried = [_classify_with(module, *names, number) for names in parameters for number in eps]
    return next((recipe for recipe in tried if isinstance(recipe, Recipe)), tried[0])


def _anatomy(
    module: nn.Module,
) -> tuple[Sequence[tuple[str | None, str | None]], Sequence[str | float]] | str:
    """The possible names of (weight, bias), and those of eps; or why it is not a plain norm.

    Of two parameters whose names do not tell which is the bias, either may be. A module without an
    eps attribute has it in its code; then the usual values are tried.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized"
    if next(module.children(), None) is not None:
        return "it has submodules"
    if next(module.buffers(), None) is not None:
        return "it has buffers"
    inputs = [p.name for p in inspect.signature(type(module).forward).parameters.values()][1:]
    if len(inputs) != 1:
        return f"its forward takes {', '.join(inputs) or 'no input'}, not one input"
    eps = eps_names(module)
    if len(eps) > 1:
        return "it has more than one eps attribute"
    named = [(name, p) for name, p in module._parameters.items() if p is not None]
    biases = [name for name, _ in named if "bias" in name or "beta" in name]
    weights = [name for name, _ in named if name not in biases]
    if len({tuple(p.shape) for _, p in named}) > 1 or len(biases) > 1 or len(named) > 2:
        shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in named)
        return f"its parameters are not one weight and one bias of the same shape: {shapes}"
    if biases and not weights:
        return "it has a bias but no weight"
    if any(p.numel() == 0 for _, p in named):
        return "its weight is empty"
    if any(p.dim() == 0 or 1 in p.shape for _, p in named) and normalized_shape(module) is None:
        return "its weight may broadcast to inputs of other shapes"
    if len(weights) == 2:
        return [(weights[0], weights[1]), (weights[1], weights[0])], eps or USUAL_EPS
    return [(next(iter(weights), None), next(iter(biases), None))], eps or USUAL_EPS


def eps_names(module: nn.Module) -> list[str]:
    """The attributes that may be an eps: `eps` and `variance_epsilon`, but not `steps`."""
    plain = (k for k, v in vars(module).items() if v is None or type(v) is float)
    return [name for name in plain if {"eps", "epsilon"} & set(name.split("_"))]


def _signature(module: nn.Module) -> Hashable | None:
    """A key for what the outcome depends on; None if an attribute is not plain data."""
    plain = int, float, bool, str, type(None), tuple, torch.dtype
    skip = vars(nn.Module()).keys()
    attributes = {k: v for k, v in vars(module).items() if k not in skip}
    if not all(isinstance(v, plain) for v in attributes.values()):
        return None
    shapes = {k: None if p is None else tuple(p.shape) for k, p in module._parameters.items()}
    now = version(type(module))
    key = now, *sorted(attributes.items()), *sorted(shapes.items()), device_of(module)
    try:
        hash(key)
    except TypeError:  # a tuple of lists
        return None
    return key


def _classify_with(
    module: nn.Module, weight: str | None, bias: str | None, eps: str | float
) -> Recipe | str:
    samples = NormSamples(module, weight, bias, eps)
    some = len(samples.input) // 10 + 2  # enough rows to tell the formulas apart
    matches = {f: samples.regimes(f, f.reference, REGIMES, some) for f in FORMULAS}
    formula = max(matches, key=lambda f: len(matches[f]))
    if not matches[formula]:
        return "its output is neither layer_norm nor rms_norm of its input"
    proven = samples.regimes(formula, formula.fused, matches[formula])
    if not proven:
        return f"its output differs from {formula} by more than rounding"
    proven = [regime for regime in proven if samples.same_at_extremes(formula, regime)]
    if not proven:
        return f"its output differs from {formula} for large, infinite or NaN inputs"
    if not samples.same_gradients(formula, proven[0], some):
        return f"its gradients differ from those of {formula}"
    if not all(samples.same_in_both_modes(regime, some) for regime in proven):
        return "its output differs between training and eval mode"
    if not samples.same_in_every_rank(formula, proven[0]):
        return "it does not normalize the last dimensions of every input"
    attributes = attributes_read(
        module, {weight, bias, eps, "normalized_shape" if weight else None}
    )
    if isinstance(attributes, str):
        return attributes
    adds = samples.adds(formula, proven, some)
    regimes = ((x, w if weight else None, on and samples.device) for x, w, on in proven)
    return Recipe(
        formula,
        weight,
        bias,
        eps,
        shape=None if weight else normalized_shape(module),
        absent=tuple(name for name, p in module._parameters.items() if p is None),
        fixed=attributes,
        regimes=frozenset(regimes),
        adds=adds,
        mixes=adds and samples.mixes(formula, proven, some),
        keeps_strides=samples.keeps_strides(),
    )


# The fused forward


def recipe_of(module: nn.Module) -> Any:
    """The module's recipe; None if it is not fused."""
    state = getattr(type(module), "_fusedops", None)
    return None if state is None else state.recipe


def _fused(original: type[nn.Module], recipe: Recipe) -> type:
    return subclass(original, recipe, lambda: _methods(original, recipe))


def _methods(original: type[nn.Module], recipe: Recipe) -> tuple[dict, dict]:
    """The fused forward, and the fields of the class's state."""
    read_operands, keeps_strides = _operands(recipe), recipe.keeps_strides
    norm, norm_of_sum = recipe.formula.fused, recipe.formula.fused_add

    @functools.wraps(original.forward)
    def forward(self, *args, **kwargs):
        if len(args) == 1 and not kwargs:
            x = args[0]
            operands = read_operands(self, x)
            if type(operands) is tuple:
                if not keeps_strides or x.is_contiguous():
                    return norm(x, *operands)
                if order := _memory_order(x, len(operands[0])):
                    y = norm(x.permute(order), *operands)
                    return y.permute([order.index(i) for i in range(x.dim())])
        return original.forward(self, *args, **kwargs)

    def add(self, x, residual, dropout_p):
        operands = read_operands(self, residual)  # h has its dtype
        if type(operands) is not tuple:
            return None
        return norm_of_sum(x, residual, *operands[1:], dropout_p=dropout_p)

    def why(self, x, adds=False):
        operands = read_operands(self, x)
        if isinstance(operands, str):
            return operands
        plain = adds or not keeps_strides or x.is_contiguous() or _memory_order(x, len(operands[0]))
        return "" if plain else STRIDED

    decides(forward, "norm", at=_itself, why=_why, repeat=_repeat)
    fields = {"recipe": recipe, "regimes": recipe.regimes, "add": add, "why": why}
    return {"forward": forward}, fields


def _itself(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return module


def _repeat(module: nn.Module, *args: Any, **kwargs: Any) -> Repeat:
    return Repeat(operator.call, operator.call, (module, *args), kwargs, (module,))


def _why(module: Any, *args: Any, **kwargs: Any) -> str:
    """Why a fused norm runs its original; empty if it does not."""
    if len(args) != 1 or kwargs:
        return "it is not called with one positional argument"
    return module._fusedops.why(module, args[0])


def _operands(recipe: Recipe) -> Callable[[nn.Module, Tensor], tuple | str]:
    """Returns a function that reads (shape, weight, [bias,] eps) from a module.

    In a regime that was not verified, it returns the reason instead. It is optimised, as this is a
    patched small norm's only overhead: `self.weight` and `x.device` would each cost as much as the
    rest.
    """
    weight_name, bias_name, eps_name = recipe.weight, recipe.bias, str(recipe.eps)
    absent, fixed = recipe.absent, recipe.fixed
    fixed_eps = recipe.eps if isinstance(recipe.eps, float) else None
    has_bias = recipe.formula.function == "layer_norm"

    def operands(self, x):
        sharded = type(x) is not Tensor and all_sharded(x)
        if not (sharded or type(x) is Tensor) or inductor_fuses(x):
            return NOT_PLAIN
        weight = bias = weight_dtype = None
        if weight_name:
            weight = self._parameters.get(weight_name)
            if weight is None:  # parametrized, or FSDP1's view
                weight = getattr(self, weight_name)
                if weight is None:
                    return CHANGED
            weight_dtype = weight.dtype
            if sharded and not all_sharded(weight):
                return NOT_PLAIN
        device = "cpu" if x.is_cpu else x.device.type
        # meta has no autocast, and raises
        has_autocast = device in USUAL or is_autocast_available(device)
        regime = x.dtype, weight_dtype, has_autocast and autocast(device) and device
        state = getattr(self, "_fusedops", None)  # None: a forward kept from before unpatch
        if state is None or regime not in state.regimes:
            return UNPROVEN
        for name in absent:
            if self._parameters.get(name) is not None:
                return CHANGED
        for name, value in fixed:
            if vars(self).get(name, MISSING) != value:
                return CHANGED
        eps = fixed_eps or getattr(self, eps_name)
        if type(eps) is not float and eps is not None:
            return CHANGED
        shape = recipe.shape or x.shape[-1:] if weight is None else weight.shape
        if not has_bias:
            return shape, weight, eps
        if bias_name:
            bias = self._parameters.get(bias_name)
            if bias is None:
                bias = getattr(self, bias_name)
                if bias is None:
                    return CHANGED
            if sharded and not all_sharded(bias):
                return NOT_PLAIN
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
