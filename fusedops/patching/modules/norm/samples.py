"""Compares a module with each known norm formula on random samples.

The compared module is a copy with its own random parameters. So modules on the meta device can be
probed, and the model's state is neither read nor changed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fusedops import functional as F
from fusedops.patching.core.probing import BF16, F32, F64, bare, device_of, drawn, quiet
from fusedops.references import norm as references

__all__ = ["FORMULAS", "Formula", "NormSamples", "Regime", "normalized_shape", "same"]

ELEMENTS = 200_000  # enough to see 1 in 10,000

# (dtype of the input, dtype of the weight, under autocast)
Regime = tuple[torch.dtype, torch.dtype, bool]


@dataclass(frozen=True)
class Formula:
    """layer_norm, or rms_norm with one of its roundings (see fusedops.functional)."""

    function: str
    rounding: str = ""
    offset: float = 0.0

    @property
    def arguments(self) -> dict:
        return {"rounding": self.rounding, "offset": self.offset} if self.rounding else {}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items() if value)
        return f"{self.function}({options})" if options else self.function

    @property
    def fused(self) -> Callable:
        """(x, shape, weight, [bias,] eps) -> y; only layer_norm has a bias."""
        return partial(getattr(F, self.function), **self.arguments)

    @property
    def fused_add(self) -> Callable:
        """(x, residual, weight, [bias,] eps, dropout_p=) -> (y, h)."""
        return partial(getattr(F, f"add_{self.function}"), **self.arguments)

    @property
    def reference(self) -> Callable:
        """`fused` in plain PyTorch."""
        return partial(getattr(references, f"{self.function}_reference"), **self.arguments)


FORMULAS = (
    Formula("layer_norm"),
    Formula("rms_norm", "llama"),
    Formula("rms_norm", "torch"),
    Formula("rms_norm", "llama", 1.0),
    Formula("rms_norm", "torch", 1.0),
)


def same(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether results for inputs of `dtype` are equal up to summation order, with equal dtypes.

    In float32 and float64 that means a few ulp in max norm. A 16-bit input is rounded on the way,
    so another order may move 1 element in 10,000 by one rounding step in bfloat16, and 8 in
    float16, whose steps are 8 times finer. A wrong rounding moves 1 in 4.
    """
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    wide = torch.promote_types(got.dtype, torch.float32)
    got, expected = got.to(wide), expected.to(wide)
    off, size = (got - expected).abs_(), expected.abs()
    floor = 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * size.max()
    moved = ~(off <= floor)  # NaN too
    if dtype.itemsize > 2:
        return not moved.any()
    eps = torch.finfo(dtype).eps
    share = 1e-4 * torch.finfo(torch.bfloat16).eps / eps
    one_step = off[moved] <= eps * size[moved] + floor
    return len(one_step) <= share * moved.numel() and bool(one_step.all())


def normalized_shape(module: nn.Module) -> tuple[int, ...] | None:
    shape = getattr(module, "normalized_shape", None)
    return tuple(shape) if isinstance(shape, tuple | list) else None


class NormSamples:
    """Compares a module and a formula on the same random inputs."""

    def __init__(self, module: nn.Module, weight: str | None, bias: str | None, eps) -> None:
        self.module, self.weight, self.bias = module, weight, bias
        self.eps = getattr(module, eps) if isinstance(eps, str) else eps
        self.device = device_of(module)
        shape = getattr(module, weight).shape if weight else normalized_shape(module)
        self.shape = tuple(shape or (64,))
        self.seed = torch.Generator().manual_seed(0)  # leaves the user's random state alone
        self.parameters = {name: self._draw(self.shape) for name in (weight, bias) if name}
        self.input, self.residual = self._inputs(), self._inputs()
        self.outputs: dict[Regime, Tensor | None] = {}

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return drawn(self.seed, *shape, dtype=F64)

    def _inputs(self) -> Tensor:
        """[rows, *shape]; every other row is so small that eps matters."""
        rows = 2 + ELEMENTS // torch.Size(self.shape).numel()
        x = self._draw((rows, *self.shape))
        x[1::2] *= (self.eps or torch.finfo(F32).eps) ** 0.5
        return x

    def regimes(
        self, formula: Formula, run: Callable, among: list[Regime], rows: int | None = None
    ) -> list[Regime]:
        """The regimes in `among` where `run` matches the module on the first `rows` rows."""
        lacking = self.bias if formula.rounding else self.eps is None
        if lacking:  # rms_norm has no bias, layer_norm has no default eps
            return []
        return [regime for regime in among if self._matches(formula, run, regime, rows)]

    def _matches(self, formula: Formula, run: Callable, regime: Regime, rows: int | None) -> bool:
        if regime not in self.outputs:
            self.outputs[regime] = self._original(self._to(self.input, regime[0]), regime)
        if (expected := self.outputs[regime]) is None:
            return False
        x = self._to(self.input[:rows], regime[0])
        with torch.no_grad(), _autocast(self.device, regime[2]):
            got = run(x, self.shape, *self._operands(formula, regime[1]))
        return same(got, expected[:rows], x.dtype)

    def same_in_every_rank(self, formula: Formula, regime: Regime) -> bool:
        """False for GroupNorm with one group: it norms other dimensions of 3-D inputs."""
        for lead in (5,), (3, 5), (2, 3, 5):
            x = self._to(self._draw((*lead, *self.shape)), regime[0])
            expected = self._original(x, regime)
            with torch.no_grad(), _autocast(self.device, regime[2]):
                got = formula.fused(x, self.shape, *self._operands(formula, regime[1]))
            if expected is None or not same(got, expected, x.dtype):
                return False
        return True

    def adds(self, formula: Formula, proven: list[Regime], rows: int) -> bool:
        """Whether the fused sum and norm equals the module applied to the sum."""
        return len(self.shape) == 1 and all(self._adds(formula, r, rows) for r in proven)

    def mixes(self, formula: Formula, proven: list[Regime], rows: int) -> bool:
        """Whether the fused sum also matches for bfloat16 x and a float32 stream (autocast)."""
        streams = [regime for regime in proven if regime[:2] == (F32, F32)]
        return len(streams) == 2 and all(self._adds(formula, r, rows, BF16) for r in streams)

    def _adds(
        self, formula: Formula, regime: Regime, rows: int, dtype: torch.dtype | None = None
    ) -> bool:
        """dtype: x's, if it differs from the residual stream's."""
        x = self._to(self.input[:rows], dtype or regime[0])
        residual = self._to(self.residual[:rows], regime[0])
        with torch.no_grad(), _autocast(self.device, regime[2]):
            y, h = formula.fused_add(x, residual, *self._operands(formula, regime[1]))
        expected = self._original(x + residual, regime)
        equal = expected is not None and same(y, expected, residual.dtype)
        return equal and torch.equal(h, x + residual)

    def same_at_extremes(self, formula: Formula, regime: Regime) -> bool:
        """Whether large values, infinities and NaN give the same results."""
        x = self._draw((6, *self.shape)) * 1e4
        for i, value in enumerate((torch.inf, -torch.inf, torch.nan)):
            x[i].view(-1)[0] = value
        x = self._to(x, regime[0])
        expected = self._original(x, regime)
        with torch.no_grad(), _autocast(self.device, regime[2]):
            got = formula.reference(x, self.shape, *self._operands(formula, regime[1]))
        if expected is None or not torch.equal(_classes(got), _classes(expected)):
            return False
        return same(_finite(got), _finite(expected), x.dtype)

    def same_gradients(self, formula: Formula, regime: Regime, rows: int) -> bool:
        """Whether autograd's gradients are the formula's, in norm, and the output has one.

        A small row has a proportionally larger gradient. The output's gradient compensates for
        that, so that every row counts.
        """
        x, cotangent = self.input[:rows], self._draw((rows, *self.shape))
        cotangent[1::2] *= (self.eps or torch.finfo(F32).eps) ** 0.5
        x = self._to(x, regime[0])
        module = self._copy(regime[1])
        operands = self._operands(formula, regime[1])
        *parameters, eps = [t.requires_grad_() if isinstance(t, Tensor) else t for t in operands]
        module_input, formula_input = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.enable_grad(), _autocast(self.device, regime[2]), quiet(self.device):
            got = module(module_input)
            expected = formula.reference(formula_input, self.shape, *parameters, eps)
        if not got.requires_grad or not same(got.detach(), expected.detach(), x.dtype):
            return False
        module_parameters = [module.get_parameter(n) for n in (self.weight, self.bias) if n]
        leaves = (
            [module_input, *module_parameters],
            [formula_input, *(p for p in parameters if p is not None)],
        )
        cotangent = self._to(cotangent, got.dtype)
        pairs = [
            torch.autograd.grad(y, of, cotangent, allow_unused=True)
            for y, of in zip((got, expected), leaves, strict=True)
        ]
        return all(_same_gradient(a, b) for a, b in zip(*pairs, strict=True))

    def same_in_both_modes(self, regime: Regime, rows: int) -> bool:
        x = self._to(self.input[:rows], regime[0])
        evaluated, trained = (self._original(x, regime, training) for training in (False, True))
        if evaluated is None or trained is None:
            return False
        return same(evaluated, trained, x.dtype)

    def _original(self, x: Tensor, regime: Regime, training: bool | None = None) -> Tensor | None:
        """The module's output; None if it rejects the dtypes."""
        module = self._copy(regime[1])
        module.training = module.training if training is None else training
        try:
            with torch.no_grad(), _autocast(self.device, regime[2]), quiet(self.device):
                y = module(x)
        except Exception:  # noqa: BLE001  a model's own code raises anything
            return None
        return y if isinstance(y, Tensor) else None

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        """The module without its hooks, with our own parameters."""
        new, names = bare(self.module), self.module._parameters
        parameters = {n: nn.Parameter(self._to(self.parameters[n], dtype)) for n in self.parameters}
        vars(new)["_parameters"] = {**dict.fromkeys(names), **parameters}
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


def _same_gradient(got: Tensor | None, expected: Tensor) -> bool:
    """Equality to a few ulp in norm."""
    if got is None or got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    off = (got.double() - expected.double()).norm()
    return bool(off <= 32 * torch.finfo(got.dtype).eps * expected.double().norm())


def _classes(t: Tensor) -> Tensor:
    """Classifies each element: NaN, an infinity, or finite."""
    return t.isnan() * 3 + t.isposinf() * 2 + t.isneginf() * 1


def _finite(t: Tensor) -> Tensor:
    return t.masked_fill(~t.isfinite(), 0.0)
