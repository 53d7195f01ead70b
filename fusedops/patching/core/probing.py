"""Runs and reads a module's code to find what it computes.

A run shows what the code computes for some inputs. Reading the code shows which attributes it reads
and whether it sets any, and so for which other calls the run's result holds.
"""

import dis
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "MISSING",
    "OBSERVERS",
    "WrittenLoss",
    "attributes_read",
    "bare",
    "changes_state",
    "closure_values",
    "device_of",
    "drawn",
    "is_transformed",
    "names_in",
    "names_of",
    "names_used",
    "plain_attributes",
    "quiet",
    "reachable_functions",
    "undisturbed",
    "within",
]

# How many active dispatch modes only observe: they run every operation as it is.
OBSERVERS: ContextVar[int] = ContextVar("dispatch modes that observe", default=0)

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

MISSING = "missing", object()
PLAIN = int, float, bool, str, type(None), torch.dtype

# Running code


def device_of(module: nn.Module) -> str:
    """The device to probe on: the module's, or the CPU for one without storage."""
    kinds = {p.device.type for p in module.parameters()} - {"meta"}
    return next(iter(kinds), "cpu")


def drawn(draw: torch.Generator, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Normal random numbers on the CPU, whatever the default device and dtype are."""
    return torch.randn(shape, generator=draw, dtype=dtype, device="cpu")


def bare(module: nn.Module) -> nn.Module:
    """A shallow copy of the module without its hooks, and with its class's forward."""
    new = object.__new__(type(module))
    hooks: dict = {k: OrderedDict() for k in vars(module) if k.endswith("_hooks")}
    vars(new).update({**vars(module), **hooks})
    vars(new).pop("forward", None)
    return new


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disables the caller's modes, hooks and transforms: tensors are plain and have gradients.

    Anomaly mode is off too, since it raises where a NaN among the inputs reaches a gradient. The
    mode of `torch.device` stays, since a model's code may need its device.
    """
    modes = _get_current_function_mode_stack()
    contexts: list[AbstractContextManager] = [
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
    ]
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        contexts.append(saved_tensors_hooks(Tensor.detach, _as_saved))  # only the innermost run
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        stack.callback(_set_function_modes, modes)
        _set_function_modes([mode for mode in modes if isinstance(mode, DeviceContext)])
        yield


def _as_saved(t: Tensor) -> Tensor:
    """A saved tensor. torch adds its graph again: kept with it, a result would hold itself."""
    return t


def _set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Makes these the thread's torch function modes, from the outermost to the innermost."""
    while _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def is_transformed() -> bool:
    """Whether torch.jit.trace, a dispatch mode or torch.func must see every operation.

    Then tensors may have no values yet, and nothing cached in this thread may be used.
    """
    return (
        torch.jit.is_tracing()
        or _is_dispatched()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _is_dispatched() -> bool:
    """Whether a dispatch mode is active that does more than observe."""
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and modes > OBSERVERS.get()


@contextmanager
def quiet(device: str) -> Iterator[None]:
    """Suppresses warnings and preserves the random state."""
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def within(got: Tensor, expected: Tensor, share: float) -> bool:
    """Whether no element is off by more than this share of the largest expected element."""
    expected = expected.double()
    return bool((got.double() - expected).abs().max() <= share * expected.abs().max())


# Reading code


def attributes_read(
    module: nn.Module, excluded: set, too: Callable[[object], bool] = lambda value: False
) -> tuple[tuple[str, Hashable], ...] | str:
    """(name, value) of the attributes that the forward reads, except the `excluded`.

    The value is MISSING if the instance has no such attribute. If a value is neither plain data nor
    accepted by `too`, changes to it cannot be detected: then the reason is returned instead.
    """
    ignored = {**dict.fromkeys(vars(nn.Module())), **module._parameters, **dict.fromkeys(excluded)}
    names = {name for code in _codes(type(module)) for name in _names_read(code)}
    values = {name: vars(module).get(name, MISSING) for name in names - ignored.keys()}
    for name, value in values.items():
        if value is not MISSING and not _is_plain_data(value) and not too(value):
            return f"its forward reads self.{name}, whose changes cannot be detected"
    present = (name for name in values if name in vars(module) or hasattr(type(module), name))
    return tuple((name, values[name]) for name in sorted(present) if not _inherited(name))


def changes_state(cls: type) -> bool:
    """Whether the forward, or code of its own that it calls, sets an attribute or a global."""
    names = {i.opname for code in _codes(cls) for i in dis.get_instructions(code)}
    return not names.isdisjoint(("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"))


def plain_attributes(module: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """(name, value) of all of the module's attributes that are plain data."""
    base_names = vars(nn.Module()).keys()
    attributes = (item for item in vars(module).items() if item[0] not in base_names)
    return tuple(sorted((name, value) for name, value in attributes if _is_plain_data(value)))


def _is_plain_data(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain_data, value))
    return isinstance(value, PLAIN)


def _inherited(name: str) -> bool:
    return hasattr(nn.Module, name)


def names_in(cls: type) -> set[str]:
    """The names in the code of the forward and of what it may call."""
    return {name for code in _codes(cls) for name in _names_read(code)}


def names_of(function: FunctionType) -> set[str]:
    """The names in one function's code."""
    return _names_read(function.__code__)


@dataclass(frozen=True)
class WrittenLoss:
    """A cross entropy that a forward's code computes.

    was: the function, with the file and line that call it. head: the head's name; empty if the
    model has a method for it. labels: the names of the arguments that hold the labels. child: the
    name of the function, if it is a child.
    """

    was: str
    head: str
    labels: tuple[str, ...]
    child: str = ""


def names_used(function: FunctionType) -> set[str]:
    """The names and arguments in the code of a function and of what it may call."""
    codes = [f.__code__ for f in reachable_functions(object, [function])]
    arguments = {name for code in codes for name in code.co_varnames[: _arguments(code)]}
    return arguments.union(*map(_names_read, codes))


def _arguments(code: CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


def _codes(cls: type) -> Iterator[CodeType]:
    """The code of the forward and of what it may call: methods, properties, own functions."""
    return (f.__code__ for f in reachable_functions(cls, _methods_named(cls, "forward")))


def reachable_functions(cls: type, waiting: list[Any]) -> Iterator[FunctionType]:
    """Yields the functions in `waiting` and the functions they may call, except torch's.

    Follows globals, closures and methods of `cls`.
    """
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        code = function.__code__
        if code in seen or str(function.__module__).partition(".")[0] == "torch":
            continue
        seen.add(code)
        yield function
        for name in _names_read(code):
            waiting += _methods_named(cls, name)
            waiting += _functions(function.__globals__.get(name))
        for value in closure_values(function).values():
            waiting += _functions(value)


def _methods_named(cls: type, name: str) -> list[FunctionType]:
    """The functions of that name in the class and, through super(), in its bases."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)] if issubclass(cls, nn.Module) else ()
    return [f for base in bases for f in _functions(vars(base).get(name))]


def _functions(value: Any) -> list[FunctionType]:
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return [value] if isinstance(value, FunctionType) else []


def closure_values(function: FunctionType) -> dict[str, object]:
    """The values in a function's closure, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: _content(cell) for name, cell in cells}


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _names_read(code: CodeType) -> set[str]:
    """The names in the code, including those in strings (`getattr(self, "scale")`)."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, CodeType):
            names |= _names_read(constant)
    return names
