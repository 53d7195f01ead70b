"""Identifies what a norm module computes: parts by name, formula by running it."""

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusedops.patching.core.introspection import attributes_read
from fusedops.patching.core.sandbox import BF16, F16, F32, F64, device_of, undisturbed
from fusedops.patching.core.swap import one_line, version
from fusedops.patching.modules.norm.formula import FORMULAS, Formula
from fusedops.patching.modules.norm.samples import Regime, Specimen, normalized_shape

__all__ = ["Recipe", "eps_names", "probe"]

USUAL_EPS = 1e-5, 1e-6, 1e-8, 1e-12
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


_known: "WeakKeyDictionary[type, dict[Hashable, Recipe | str]]" = WeakKeyDictionary()


def probe(module: nn.Module) -> Recipe | str:
    """The module's recipe, or the reason why no fused function can replace it."""
    try:
        with undisturbed():
            return _probe(module)
    except Exception as error:  # noqa: BLE001  a model's own code raises anything
        return f"probing it failed: {one_line(error)}"


def _probe(module: nn.Module) -> Recipe | str:
    found = _anatomy(module)
    if isinstance(found, str):
        return found
    key = _signature(module)
    known = _known.setdefault(type(module), {})
    if key is None:
        return _classify(module, *found)
    if key not in known:
        known[key] = _classify(module, *found)
    return known[key]


def _classify(module: nn.Module, weight: str | None, bias: str | None, eps: Sequence):
    tried = [_classify_with(module, weight, bias, one) for one in eps]
    return next((found for found in tried if isinstance(found, Recipe)), tried[0])


def _anatomy(module: nn.Module) -> tuple[str | None, str | None, Sequence[str | float]] | str:
    """The names of weight, bias and eps; or why the module is not a plain norm.

    A module without an eps attribute has it in its code; then the usual values are tried.
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
    if len({tuple(p.shape) for _, p in named}) > 1 or len(biases) > 1 or len(weights) > 1:
        return "its parameters are not one weight and one bias of the same shape"
    if biases and not weights:
        return "it has a bias but no weight"
    if any(p.numel() == 0 for _, p in named):
        return "its weight is empty"
    if any(p.dim() == 0 or 1 in p.shape for _, p in named) and normalized_shape(module) is None:
        return "its weight may broadcast to inputs of other shapes"
    return next(iter(weights), None), next(iter(biases), None), eps or USUAL_EPS


def eps_names(module: nn.Module) -> list[str]:
    """The attributes that may be an eps: `eps` and `variance_epsilon`, but not `steps`."""
    plain = (k for k, v in vars(module).items() if v is None or type(v) is float)
    return [name for name in plain if {"eps", "epsilon"} & set(name.split("_"))]


def _signature(module: nn.Module) -> Hashable | None:
    """A key for what the outcome depends on; None if an attribute is not plain data."""
    plain = int, float, bool, str, type(None), tuple, torch.dtype
    skip = vars(nn.Module()).keys()
    own = {k: v for k, v in vars(module).items() if k not in skip}
    if not all(isinstance(v, plain) for v in own.values()):
        return None
    shapes = {k: None if p is None else tuple(p.shape) for k, p in module._parameters.items()}
    now = version(type(module))
    key = now, *sorted(own.items()), *sorted(shapes.items()), device_of(module)
    try:
        hash(key)
    except TypeError:  # a tuple of lists
        return None
    return key


def _classify_with(
    module: nn.Module, weight: str | None, bias: str | None, eps: str | float
) -> Recipe | str:
    specimen = Specimen(module, weight, bias, eps)
    some = len(specimen.input) // 10 + 2  # enough rows to tell the formulas apart
    matches = {f: specimen.regimes(f, f.reference, REGIMES, some) for f in FORMULAS}
    formula = max(matches, key=lambda f: len(matches[f]))
    if not matches[formula]:
        return "its output is neither layer_norm nor rms_norm of its input"
    proven = specimen.regimes(formula, formula.fused, matches[formula])
    if not proven:
        return f"its output differs from {formula} by more than rounding"
    proven = [regime for regime in proven if specimen.same_at_extremes(formula, regime)]
    if not proven:
        return f"its output differs from {formula} for large, infinite or NaN inputs"
    if not specimen.same_gradients(formula, proven[0], some):
        return f"its gradients differ from those of {formula}"
    if not all(specimen.same_in_both_modes(regime, some) for regime in proven):
        return "its output differs between training and eval mode"
    if not specimen.same_in_every_rank(formula, proven[0]):
        return "it does not normalize the last dimensions of every input"
    attributes = attributes_read(
        module, {weight, bias, eps, "normalized_shape" if weight else None}
    )
    if isinstance(attributes, str):
        return attributes
    adds = specimen.adds(formula, proven, some)
    regimes = ((x, w if weight else None, on and specimen.device) for x, w, on in proven)
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
        mixes=adds and specimen.mixes(formula, proven, some),
        keeps_strides=specimen.keeps_strides(),
    )
