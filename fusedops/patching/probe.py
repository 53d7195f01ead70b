"""Finds out what a norm module computes, by running a copy of it.

The copy shares the module's attributes and has random parameters of its own, so a module on the
meta device is probed too, and no state of the model is read or changed.
"""

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fusedops.patching.formula import FORMULAS, Formula, same

__all__ = ["Recipe", "probe"]

USUAL_EPS = 1e-5, 1e-6, 1e-8, 1e-12
ELEMENTS = 200_000  # enough to see 1 in 10,000
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

# (dtype of the input, dtype of the weight, under autocast)
Regime = tuple[torch.dtype, torch.dtype, bool]
REGIMES: list[Regime] = [
    *((x, x, False) for x in (F32, BF16, F16, F64)),
    *((x, F32, False) for x in (BF16, F16)),
    *((x, F32, True) for x in (F32, BF16, F16)),
]
# What a module raises when it is not what we took it for.
MISTAKEN = (AssertionError, AttributeError, LookupError, TypeError)
REFUSALS = (ArithmeticError, RuntimeError, ValueError, *MISTAKEN)


@dataclass(frozen=True)
class Recipe:
    """How a fused function takes the place of a norm module's forward.

    weight, bias: parameter names, None where the module has none. eps: the attribute's name, or
    its value. shape: the normalized shape where no weight gives it, None for the last dimension.
    regimes: (input dtype, weight dtype, device type when under autocast else False) in which the
    fused function was seen to equal the module. adds: so was the fused function of a sum.
    keeps_strides: the module's output is permuted in memory where its input is; the fused output
    is always contiguous.
    """

    formula: Formula
    weight: str | None
    bias: str | None
    eps: str | float
    shape: tuple[int, ...] | None
    regimes: frozenset
    adds: bool
    keeps_strides: bool


_known: "WeakKeyDictionary[type, dict[Hashable, Recipe | str]]" = WeakKeyDictionary()


def probe(module: nn.Module) -> Recipe | str:
    """The module's recipe, or the reason why no fused function can stand for it."""
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
    """The names of weight, bias and eps; or what keeps the module from being a plain norm.

    A module without an eps attribute has it in its code: then the usual values are tried.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if next(module.children(), None) is not None:
        return "it has submodules"
    if next(module.buffers(), None) is not None:
        return "it has buffers"
    inputs = [p.name for p in inspect.signature(type(module).forward).parameters.values()][1:]
    if len(inputs) != 1:
        return f"its forward takes {', '.join(inputs) or 'nothing'}"
    eps = [k for k, v in vars(module).items() if "eps" in k and (v is None or type(v) is float)]
    if len(eps) > 1:
        return "it has more than one eps attribute"
    named = [(name, p) for name, p in module._parameters.items() if p is not None]
    biases = [name for name, _ in named if "bias" in name or "beta" in name]
    weights = [name for name, _ in named if name not in biases]
    if len({tuple(p.shape) for _, p in named}) > 1 or len(biases) > 1 or len(weights) > 1:
        return "its parameters are not one weight and one bias of the same shape"
    if biases and not weights:
        return "it has a bias and no weight"
    if any(p.numel() == 0 for _, p in named):
        return "its weight is empty"
    return next(iter(weights), None), next(iter(biases), None), eps or USUAL_EPS


def _signature(module: nn.Module) -> Hashable | None:
    """What the outcome depends on; None when an attribute is not plain data."""
    plain = int, float, bool, str, type(None), tuple, torch.dtype
    skip = vars(nn.Module()).keys()
    own = {k: v for k, v in vars(module).items() if k not in skip}
    if not all(isinstance(v, plain) for v in own.values()):
        return None
    shapes = {k: None if p is None else tuple(p.shape) for k, p in module._parameters.items()}
    return *sorted(own.items()), *sorted(shapes.items()), _device(module)


def _device(module: nn.Module) -> str:
    """Where to probe: where the module is, the CPU for one without storage."""
    kinds = {p.device.type for p in module.parameters()} - {"meta"}
    return next(iter(kinds), "cpu")


def _classify_with(
    module: nn.Module, weight: str | None, bias: str | None, eps: str | float
) -> Recipe | str:
    specimen = _Specimen(module, weight, bias, eps)
    some = len(specimen.input) // 10 + 2  # rows that tell the formulas apart
    matches = {f: specimen.regimes(f, f.reference, REGIMES, some) for f in FORMULAS}
    formula = max(matches, key=lambda f: len(matches[f]))
    if not matches[formula]:
        return "its output is neither layer_norm nor rms_norm of its input"
    proven = specimen.regimes(formula, formula.fused, matches[formula])
    if not proven:
        return f"{formula} differs from it by more than rounding"
    if not specimen.same_in_every_rank(formula, proven[0]):
        return "it does not norm the last dimensions of every input"
    regimes = ((x, w if weight else None, on and specimen.device) for x, w, on in proven)
    return Recipe(
        formula,
        weight,
        bias,
        eps,
        shape=None if weight else getattr(module, "normalized_shape", None),
        regimes=frozenset(regimes),
        adds=specimen.adds(formula, proven, some),
        keeps_strides=specimen.keeps_strides(),
    )


class _Specimen:
    """A module under probe: copies of it with random parameters, and inputs for them."""

    def __init__(self, module: nn.Module, weight: str | None, bias: str | None, eps) -> None:
        self.module, self.weight, self.bias = module, weight, bias
        self.eps = getattr(module, eps) if isinstance(eps, str) else eps
        self.device = _device(module)
        of = getattr(module, weight).shape if weight else getattr(module, "normalized_shape", (64,))
        self.shape = tuple(of)
        self.seed = torch.Generator().manual_seed(0)  # the user's random stream stays as it is
        self.parameters = {name: self._draw(self.shape) for name in (weight, bias) if name}
        self.input, self.residual = self._inputs(), self._inputs()
        self.outputs: dict[Regime, Tensor | None] = {}

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.seed, dtype=F64, device="cpu")

    def _inputs(self) -> Tensor:
        """[rows, *shape]; every other row is so small that eps matters as much as it does."""
        rows = 2 + ELEMENTS // torch.Size(self.shape).numel()
        x = self._draw((rows, *self.shape))
        x[1::2] *= (self.eps or torch.finfo(F32).eps) ** 0.5
        return x

    def regimes(
        self, formula: Formula, run: Callable, among: list[Regime], rows: int | None = None
    ) -> list[Regime]:
        """Those of `among` in which `run` gives what the module gives, on the first rows."""
        lacking = self.bias if formula.rounding else self.eps is None
        if lacking:  # rms_norm has no bias, layer_norm no default eps
            return []
        return [regime for regime in among if self._equal(formula, run, regime, rows)]

    def _equal(self, formula: Formula, run: Callable, regime: Regime, rows: int | None) -> bool:
        if regime not in self.outputs:
            self.outputs[regime] = self._original(self._to(self.input, regime[0]), regime)
        if (wanted := self.outputs[regime]) is None:
            return False
        x = self._to(self.input[:rows], regime[0])
        with torch.no_grad(), _autocast(self.device, regime[2]):
            got = run(x, self.shape, *self._operands(formula, regime[1]))
        return same(got, wanted[:rows], x.dtype)

    def same_in_every_rank(self, formula: Formula, regime: Regime) -> bool:
        """False for GroupNorm of one group: layer_norm in 2-D, over channels and width in 3-D."""
        for lead in (5,), (3, 5), (2, 3, 5):
            x = self._to(self._draw((*lead, *self.shape)), regime[0])
            wanted = self._original(x, regime)
            with torch.no_grad(), _autocast(self.device, regime[2]):
                got = formula.fused(x, self.shape, *self._operands(formula, regime[1]))
            if wanted is None or not same(got, wanted, x.dtype):
                return False
        return True

    def adds(self, formula: Formula, proven: list[Regime], rows: int) -> bool:
        """Whether the fused sum and norm equals the module after the sum."""
        return len(self.shape) == 1 and all(self._adds(formula, r, rows) for r in proven)

    def _adds(self, formula: Formula, regime: Regime, rows: int) -> bool:
        x, residual = (self._to(t[:rows], regime[0]) for t in (self.input, self.residual))
        with torch.no_grad(), _autocast(self.device, regime[2]):
            y, h = formula.fused_add(x, residual, *self._operands(formula, regime[1]))
        wanted = self._original(x + residual, regime)
        equal = wanted is not None and same(y, wanted, x.dtype)
        return equal and torch.equal(h, x + residual)

    def _original(self, x: Tensor, regime: Regime) -> Tensor | None:
        """The module's output, None where it refuses the dtypes."""
        try:
            with torch.no_grad(), _autocast(self.device, regime[2]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = self._copy(regime[1])(x)
        except REFUSALS:
            return None
        return y if isinstance(y, Tensor) else None

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        """The module without its hooks, with parameters of our own."""
        new = object.__new__(type(self.module))
        hooks: dict = {k: OrderedDict() for k in vars(self.module) if k.endswith("_hooks")}
        names = self.module._parameters
        own = {n: nn.Parameter(self._to(self.parameters[n], dtype)) for n in self.parameters}
        vars(new).update({**vars(self.module), **hooks})
        vars(new)["_parameters"] = {**dict.fromkeys(names), **own}
        return new

    def _operands(self, formula: Formula, dtype: torch.dtype) -> list:
        names = [self.weight, self.bias][: 2 if formula.function == "layer_norm" else 1]
        return [n and self._to(self.parameters[n], dtype) for n in names] + [self.eps]

    def _to(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return t.to(self.device, dtype)

    def keeps_strides(self) -> bool:
        x = self._to(self._draw((2, 3, *self.shape)), F32).transpose(0, 1)
        y = self._original(x, (F32, F32, False))
        return y is None or not y.is_contiguous()


def _autocast(device: str, enabled: bool) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=enabled)
