"""Identifies activations: modules by running them, and torch's functions from a table."""

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedops.functional import geglu, swiglu
from fusedops.patching.core.probing import (
    BF16,
    F16,
    F32,
    F64,
    MISSING,
    attributes_read,
    bare,
    changes_state,
    device_of,
    plain_attributes,
    quiet,
    undisturbed,
)
from fusedops.patching.core.swap import (
    Unswappable,
    active_state,
    has_hooks,
    original_class,
    subclass,
    swap,
)

__all__ = [
    "Activation",
    "ActivationRef",
    "WrittenActivation",
    "activation_of",
    "function_of",
    "identified",
    "learn_expression",
    "learn_function",
    "looks_like_an_activation",
    "patch_activation",
]

UNKNOWN = "activation is not SiLU, GELU or ReLU"
NAMES = "act", "activation", "relu", "gelu", "silu", "swish"  # in class and attribute names


@dataclass(frozen=True)
class Activation:
    """An elementwise function: `linear`'s "relu", "gelu", "gelu_tanh" or "silu".

    alpha: for "silu", g * sigmoid(alpha * g). cast: whether autocast changes its output dtype.
    fixed: the module's attributes when it was probed.
    """

    name: str
    alpha: float = 1.0
    cast: bool = False
    fixed: tuple[tuple[str, Hashable], ...] = ()

    @property
    def linear_name(self) -> str | None:
        """`linear`'s name for it; None if `linear` lacks it."""
        return self.name if self.alpha == 1 else None

    @property
    def gated(self) -> Callable[..., Tensor] | None:
        """The function of (gate, up) that applies this activation to the gate."""
        if self.name == "silu":
            return functools.partial(swiglu, alpha=self.alpha)
        if self.name not in ("gelu", "gelu_tanh"):
            return None
        return functools.partial(geglu, approximate="tanh" if self.name == "gelu_tanh" else "none")

    @property
    def gated_name(self) -> str:
        options = f"(alpha={self.alpha})" if self.alpha != 1 else ""
        options = "(approximate='tanh')" if self.name == "gelu_tanh" else options
        return f"{'swiglu' if self.name == 'silu' else 'geglu'}{options}"


@dataclass(frozen=True)
class ActivationRef:
    """An activation as a forward refers to it: a module attribute, or else a function.

    options: keywords of the function, as quoted text or as the dotted name of an attribute.
    """

    name: str
    function: Any = None
    options: tuple[tuple[str, str], ...] = ()

    def of(self, module: nn.Module) -> Any:
        if self.name:
            return attrgetter(self.name)(module)
        if not self.options:
            return self.function
        given: dict[str, Any] = {}
        for name, value in self.options:
            try:
                given[name] = value[1:-1] if value[0] in "'\"" else attrgetter(value)(module)
            except AttributeError:  # it is set later
                given[name] = None
        return functools.partial(self.function, **given)


@dataclass(frozen=True)
class WrittenActivation:
    """An expression of one tensor in a forward. run: computes it as it is written."""

    activation: Activation
    run: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)  # type: ignore[misc]


CANDIDATES: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation("silu"): F.silu,
    Activation("gelu"): F.gelu,
    Activation("gelu_tanh"): functools.partial(F.gelu, approximate="tanh"),
    Activation("relu"): F.relu,
    Activation("silu", alpha=1.702): lambda x: x * torch.sigmoid(1.702 * x),
}
FUNCTIONS: dict[Any, Activation] = {
    F.silu: Activation("silu"),
    F.gelu: Activation("gelu"),
    F.relu: Activation("relu"),
    torch.relu: Activation("relu"),
}
GELUS = {"none": Activation("gelu"), "tanh": Activation("gelu_tanh")}
VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_tried: "WeakSet[FunctionType]" = WeakSet()
_expressions: dict[tuple, Activation | None] = {}  # by text, tensor's name and other names' values


def looks_like_an_activation(name: str, module: nn.Module) -> bool:
    """Whether the module is a stateless leaf with an activation's name, or class name."""
    if any(next(of, None) is not None for of in _contents(module)):
        return False
    words = name.lower(), original_class(module).__name__.lower()
    return any(fragment in word for word in words for fragment in NAMES)


def _contents(module: nn.Module) -> Iterator[Iterator]:
    yield from (module.parameters(), module.buffers(), module.children())


def patch_activation(act: Any) -> Activation | str:
    """Identifies a module's or function's activation, or says why it cannot be identified.

    A known module gets a class that records the activation. Its own forward stays; a layer that
    applies it after a linear or to a gate may then run a fused function in place of both.
    """
    if not isinstance(act, nn.Module):
        return function_of(act) or UNKNOWN
    if has_hooks(act):
        return "its activation has hooks"
    activation = identified(act)
    if isinstance(activation, Activation):
        try:
            swap(act, functools.partial(_with, activation=activation))
        except Unswappable as why:
            return str(why)
    return activation


def identified(act: nn.Module) -> Activation | str:
    """The activation that a module computes, or why it cannot be identified."""
    recorded = active_state(act).activation
    return recorded if recorded and _unchanged(act, recorded) else _identify(act)


def _with(original: type[nn.Module], activation: Activation) -> type:
    build = {"forward": original.forward}, {"activation": activation}
    return subclass(original, activation, lambda: build)


def function_of(value: Any) -> Activation | None:
    """The activation that a function computes: one of torch, a `partial` of F.gelu, or a module's.

    None for any other value.
    """
    if isinstance(value, WrittenActivation):
        return value.activation
    if isinstance(value, functools.partial):
        approximate = value.keywords.get("approximate")
        plain = value.func is F.gelu and not value.args and len(value.keywords) == 1
        return GELUS.get(approximate) if plain and isinstance(approximate, str) else None
    return next(
        (activation for function, activation in FUNCTIONS.items() if value is function), None
    )


def learn_function(value: object) -> None:
    """Runs a function of a Python module that has an activation's name, to find what it computes.

    It must read nothing but torch, math, numpy and its argument: changes of a global are not seen.
    """
    global FUNCTIONS
    if not isinstance(value, FunctionType) or value in _tried:
        return
    _tried.add(value)
    home = sys.modules.get(value.__module__)
    lasts = getattr(home, value.__qualname__, None) is value
    if lasts and _is_pure(value):
        module = _Function(value)
        if activation := _candidate_of(module):
            activation = replace(activation, cast=_is_cast(module))
            FUNCTIONS = {**FUNCTIONS, value: activation}  # another thread may read the old one


def learn_expression(text: str, name: str, values: dict[str, object]) -> Activation | None:
    """The activation that an expression of one tensor computes; None for another expression.

    name: the tensor's. values: of the other names: numbers, or as in `_is_fixed`.
    """
    numbers = {n: value for n, value in values.items() if type(value) in (int, float)}
    others = {n: value for n, value in values.items() if n not in numbers}
    if not all(map(_is_fixed, others.values())):
        return None
    key = text, name, *sorted(numbers.items()), *sorted((n, id(v)) for n, v in others.items())
    if key not in _expressions:
        run = eval(f"lambda {name}: {text}", dict(values))
        module = _Function(run)
        activation = _candidate_of(module)
        _expressions[key] = activation and replace(activation, cast=_is_cast(module))
    return _expressions[key]


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _is_pure(function: FunctionType) -> bool:
    """Whether it takes one argument, has an activation's name and reads only fixed values."""
    code = function.__code__
    name, arguments = code.co_name.lower(), code.co_argcount + code.co_kwonlyargcount
    plain = arguments == 1 and not code.co_flags & VARIADIC and not code.co_freevars
    if not plain or not any(fragment in name for fragment in NAMES):
        return False
    globals_read = [function.__globals__[n] for n in code.co_names if n in function.__globals__]
    opnames = {i.opname for i in dis.get_instructions(code)}
    return all(map(_is_fixed, globals_read)) and opnames.isdisjoint(
        ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "MAKE_FUNCTION", "IMPORT_NAME")
    )


UNKNOWN_NOW = "its activation has hooks, has changed, or is cast by autocast"


def activation_of(act: Any, x: Tensor) -> Activation | None:
    """The activation that a known module or torch function computes for x now, or None."""
    if not isinstance(act, nn.Module):
        activation = function_of(act)
    else:
        activation = active_state(act).activation
        if activation and (has_hooks(act) or not _unchanged(act, activation)):
            return None
    if activation is None:
        return None
    return None if activation.cast and torch.is_autocast_enabled(x.device.type) else activation


def _unchanged(act: nn.Module, activation: Activation) -> bool:
    attributes = vars(act)
    return all(attributes.get(name, MISSING) == value for name, value in activation.fixed)


def _identify(module: nn.Module) -> Activation | str:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if changes_state(type(module)):
        return "its activation changes attributes when called"
    read = attributes_read(module, set(), _is_torchs)
    if isinstance(read, str):
        return read
    candidate = _candidate_of(module)
    if candidate is None:
        return UNKNOWN
    attributes = tuple(dict([*read, *plain_attributes(module)]).items())
    return Activation(candidate.name, candidate.alpha, _is_cast(module), attributes)


def _candidate_of(module: nn.Module) -> Activation | None:
    return next((a for a, f in CANDIDATES.items() if _computes(module, f)), None)


def _is_fixed(value: object) -> bool:
    """Whether the value is a function of torch, or a module of torch, math or numpy."""
    if isinstance(value, ModuleType):
        return value.__name__ in ("math", "numpy", "torch", "torch.nn", "torch.nn.functional")
    return _is_torchs(value)


def _is_torchs(value: object) -> bool:
    """Whether the value is a torch function, whose meaning does not change."""
    if isinstance(value, functools.partial):
        return _is_torchs(value.func)
    home = str(getattr(value, "__module__", ""))
    return callable(value) and home.partition(".")[0] == "torch"


def _computes(module: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
    """Whether the module equals the function: values, gradients, dtypes, both modes."""
    device, module = device_of(module), bare(module)
    try:
        with undisturbed(), quiet(device):
            x = torch.linspace(-14, 14, 2003, dtype=F64, device=device)
            x = torch.cat([x, x.new_tensor([0.0, -0.0, 1e4, -1e4, torch.nan])])
            same = all(_close(_values(m, x), _values(function, x)) for m in _both_modes(module))
            return same and all(_keeps(module, function, x, dtype) for dtype in (F32, BF16, F16))
    except Exception:  # noqa: BLE001  a model's own code raises anything
        return False


def _is_cast(module: nn.Module) -> bool:
    """Whether autocast changes the dtype of a 16-bit input, as pow does on some devices."""
    device, module = device_of(module), bare(module)
    with undisturbed(), quiet(device), torch.no_grad():
        x = torch.ones(3, dtype=BF16, device=device)
        with torch.autocast(device, BF16):
            return any(module(t).dtype != t.dtype for t in (x, x.float()))


def _both_modes(module: nn.Module) -> Iterator[nn.Module]:
    for mode in (False, True):
        module.training = mode
        yield module


def _values(run: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    """(y, the gradient of its sum)"""
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        y = run(leaf * 1)
        return y.detach(), torch.autograd.grad(y.sum(), leaf)[0]


def _close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Equality in float64; some GELUs have a constant in float32, or of ten digits."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-7, 1e-8, True)
        for a, b in zip(got, expected, strict=True)
    )


def _keeps(module: nn.Module, function: Callable, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the values also match in a narrower dtype, up to its largest number.

    Checks several shapes, with and without gradients, and that x is not modified. Allows the
    rounding errors of a few operations on numbers as large as x.
    """
    info = torch.finfo(dtype)
    x = torch.cat([x, x.new_tensor([-0.5, -0.02, 0.02, 0.5]) * info.max]).to(dtype)
    for t in (x.clone(), x.view(4, -1, 1).clone(), x.clone().requires_grad_()):
        with torch.set_grad_enabled(t.requires_grad):
            y = module(t * 1 if t.requires_grad else t).detach()
        wide = t.detach().double()
        expected = function(wide)
        rounding = 8 * info.eps * (expected.abs() + wide.abs())
        off = (y.double() - expected).abs() - rounding - info.tiny
        near = (off <= 0) | (y.isnan() & expected.isnan())
        if y.dtype != dtype or not near.all() or not _same_bits(t, x):
            return False
    return True


def _same_bits(t: Tensor, other: Tensor) -> bool:
    return torch.equal(t.detach().flatten().nan_to_num(), other.nan_to_num())
