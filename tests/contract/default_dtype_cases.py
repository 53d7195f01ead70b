"""Operator calls, modules and a context manager for tests under other default dtypes or devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from attention import cases as attention_cases
from cross_entropy import cases as cross_entropy_cases
from norm import cases as norm_cases
from quantized_linear import cases as quantized_cases
from torch import Tensor

import fusedops
from contract.family import BF16, F16, F32, F64, FAMILIES, Call


@contextmanager
def default(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    """Within it, new tensors have another dtype and are on another device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


DEFAULTS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": F64},
    "bfloat16 on meta": {"dtype": BF16, "device": "meta"},
    "float16 on cpu": {"dtype": F16, "device": "cpu"},
}


@dataclass(frozen=True)
class Bound:
    """A call's function and reference, and the arguments with gradients of both."""

    operator: str
    function: Callable
    reference: Callable
    args: tuple[Tensor, ...]
    draws: tuple[Callable, ...] = ()  # references that add in another order


def bound(call: Call, dtype: torch.dtype = F32) -> Bound:
    args = call.args(6, dtype=dtype)
    references = (call.on_leaves(run, args)[0] for run in call.draws())
    return Bound(call.operator, *call.both(args), tuple(references))


CALLS = {
    f"{family} {name}": call
    for family, record in FAMILIES.items()
    for name, call in (record.calls | record.more | record.further).items()
}


def _modules() -> Iterator[tuple[str, Callable, tuple]]:
    """Name, constructor of device and dtype, inputs."""
    nn = fusedops.nn
    x, residual, *_ = norm_cases.inputs("add_layer_norm", (3, 33), F32)
    for kind in (nn.LayerNorm, nn.RMSNorm):
        yield kind.__name__, partial(kind, 33, eps=1e-6), (x,)
    for kind in (nn.AddLayerNorm, nn.AddRMSNorm):
        yield kind.__name__, partial(kind, 33, eps=1e-6), (x, residual)
    for kind in (nn.SwiGLU, nn.GEGLU):
        yield kind.__name__, lambda kind=kind, **to: kind(), (x, residual)
    x, *_ = quantized_cases.inputs((3, 64), 24, F32)
    yield "Linear", partial(nn.Linear, 64, 24, activation="gelu"), (x,)
    for kind, (format, options) in quantized_cases.FORMATS.items():
        make = partial(nn.QuantizedLinear, 64, 24, format=format, **options)
        yield f"QuantizedLinear {kind}", make, (x,)
    targets = cross_entropy_cases.targets(9, 17)
    logits = cross_entropy_cases.logits(9, 17), targets
    yield "CrossEntropyLoss", lambda **to: nn.CrossEntropyLoss(label_smoothing=0.1), logits
    head = partial(nn.LinearCrossEntropyLoss, 12, 17, bias=True)
    yield "LinearCrossEntropyLoss", head, (cross_entropy_cases.head(9, 12, 17)[0], targets)
    qkv = tuple(attention_cases.drawn(seed, 2, 5, 24) for seed in range(3))
    attend = partial(_WithoutWeights, 24, 4, batch_first=True)
    yield "MultiheadAttention", attend, qkv


class _WithoutWeights(fusedops.nn.MultiheadAttention):
    def forward(self, *qkv: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*qkv, need_weights=False)[0]


MODULES = {name: (make, inputs) for name, make, inputs in _modules()}


def module_call(name: str) -> Bound:
    """A new module's forward as a function of its parameters and inputs; by the references too."""
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = make(device="cpu", dtype=F32)
    names, parameters = zip(*module.named_parameters(), strict=True) if _has(module) else ((), ())

    def function(*args: Tensor) -> Any:
        module_tensors = dict(zip(names, args, strict=False))
        return torch.func.functional_call(module, module_tensors, args[len(names) :])

    def reference(*args: Tensor) -> Any:
        with fusedops.backend("reference"):
            return function(*args)

    return Bound("linear", function, reference, (*parameters, *inputs))


def _has(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None
